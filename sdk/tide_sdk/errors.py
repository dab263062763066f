"""Errors of the contract: one class, a closed table of codes, and the boundary that each code names."""

from __future__ import annotations

from typing import Any, Final

from tide_sdk.wire import Problem

CODES: Final[dict[str, tuple[int, str]]] = {
    "unauthorized": (401, "The key is missing or unknown"),
    "forbidden": (403, "The call is not allowed"),
    "not_found": (404, "No such task"),
    "environment_unknown": (404, "No such environment"),
    "method_not_allowed": (405, "The endpoint does not take this method"),
    "turn_conflict": (409, "The turn was already taken with another message"),
    "turn_order": (409, "The turn is out of order"),
    "key_conflict": (409, "The key was already used for another start"),
    "stale_attempt": (409, "A higher attempt of this key exists"),
    "state_conflict": (409, "The task's state does not allow this call"),
    "expired": (410, "A clock of the task has expired"),
    "ended": (410, "The task has ended"),
    "too_large": (413, "The body is too large"),
    "media_type": (415, "The body must be application/json"),
    "invalid": (422, "The request is not valid"),
    "paused": (423, "The task is paused"),
    "capacity": (429, "No capacity now"),
    "internal": (500, "Unexpected failure in the server"),
    "environment_failed": (502, "The environment failed"),
    "environment_lost": (503, "The environment's instance is gone"),
    "unavailable": (503, "The server cannot serve now"),
    "turn_expired": (504, "The turn's clock expired while the environment acted"),
}
"""code -> (HTTP status, title). Codes are stable: clients branch on them."""


class StoppedEarly(Exception):
    """The task was cut short by a limit, or by a reply that a framework could make no use of: it is truncated."""


class TideError(Exception):
    """A failure that the contract names.

    Attributes:
        code: one of `CODES`.
        status: the HTTP status that belongs to the code.
        detail: what happened and what the caller can do.
        extra: further members of the problem body, for example `field`, `clock`, `retry_after_s`.
    """

    def __init__(self, code: str, detail: str, **extra: Any) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.status = CODES[code][0]
        self.detail = detail
        self.extra = extra

    def problem(self) -> Problem:
        """The error as an RFC 9457 body."""
        status, title = CODES[self.code]
        return Problem(
            type=f"urn:tide:problem:{self.code}",
            title=title,
            status=status,
            code=self.code,
            detail=self.detail,
            **self.extra,
        )

    @classmethod
    def from_problem(cls, status: int, body: dict[str, Any]) -> TideError:
        """The error that a peer sent; an unknown code is kept as `internal` with its words."""
        code = str(body.get("code", ""))
        detail = str(body.get("detail") or body.get("title") or f"HTTP {status}")
        extra = {k: v for k, v in body.items() if k not in {"type", "title", "status", "code", "detail"}}
        if code in CODES:
            return cls(code, detail, **extra)
        return cls("internal", f"HTTP {status}: {detail}", **extra)


def told(error: BaseException, most: int = 500) -> str:
    """An error's kind and words, at most so many characters; an author's exception may fail even to say what it is."""
    try:
        words = f"{type(error).__name__}: {error}"
    except Exception as second:  # noqa: BLE001
        words = f"{type(error).__name__}, whose __str__ raised {type(second).__name__}"
    return words[:most].encode("utf-8", "backslashreplace").decode()[:most]
