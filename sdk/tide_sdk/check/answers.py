"""Answers of the server under test, and what the contract expects of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from tide_sdk import codec
from tide_sdk.check.case import Failed
from tide_sdk.errors import CODES
from tide_sdk.http_parse import Response

M = TypeVar("M", bound=BaseModel)
MAX_EXCERPT = 400
"""Characters of a body that are shown."""
_MAX_VALUE = 80


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered.

    Attributes:
        call: method and path.
        response: status, headers and body as received.
        data: the parsed body, None where it is not JSON.
    """

    call: str
    response: Response
    data: Any

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.response.status

    @property
    def fields(self) -> dict[str, Any]:
        """The body as an object, {} where it is none."""
        data: Any = self.data
        return cast("dict[str, Any]", data) if isinstance(data, dict) else {}


def expect(answer: Answer, status: int | Sequence[int], code: str = "") -> Answer:
    """The answer, after a look at its status and, for an error, its code.

    Raises:
        Failed: it has another.
    """
    wanted = (status,) if isinstance(status, int) else tuple(status)
    got = str(answer.fields.get("code", "")) if answer.status >= 400 else ""
    if answer.status not in wanted or (code and got != code):
        asked = " or ".join(str(number) for number in wanted)
        raise Failed(f"{answer.call}: expected {asked} {code}".rstrip() + f", got {answer.status} {got}".rstrip())
    return answer


def refused(answer: Answer, code: str, field: str = "") -> Answer:
    """The answer, after a look that it is the error `code`, naming `field` (or a part of it) where one is given.

    Raises:
        Failed: it is another answer.
    """
    expect(answer, CODES[code][0], code)
    if field:
        named, detail = str(answer.fields.get("field")), str(answer.fields.get("detail"))
        if named != field and not named.startswith(f"{field}."):
            raise Failed(f"{answer.call}: the error's field is {named} and not {field}")
        if not detail.startswith(named):
            raise Failed(f"{answer.call}: the error's detail does not begin with its field {named}: {detail[:80]}")
    return answer


def parse(model: type[M], answer: Answer) -> M:
    """The answer as the contract's model, checked as a gateway checks it.

    Raises:
        Failed: naming the first wrong field.
    """
    if not isinstance(answer.data, dict):
        raise Failed(f"{answer.call}: the answer is not a JSON object that can be read")
    try:
        return model.model_validate_json(answer.response.body, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "body"
        words = "unknown field" if fault["type"] == "extra_forbidden" else fault["msg"]
        raise Failed(f"{answer.call}: the answer is not the contract's: {where}: {words}") from error


def same(one: Any, other: Any, what: str) -> None:
    """Check that two parsed answers are the same JSON.

    Raises:
        Failed: naming the first place where they differ.
    """
    place = _difference(one, other, "")
    if place is not None:
        raise Failed(f"{what}: they differ at {place}")


def excerpt(body: bytes) -> str:
    """The beginning of a body, for people."""
    text = body.decode("utf-8", "backslashreplace")
    return text if len(text) <= MAX_EXCERPT else f"{text[:MAX_EXCERPT]}... ({len(body)} bytes)"


def _difference(one: Any, other: Any, place: str) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        first, second = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        for name in first.keys() | second.keys():
            if name not in first or name not in second:
                return f"{place}{name}: only in one of them"
            found = _difference(first[name], second[name], f"{place}{name}.")
            if found is not None:
                return found
        return None
    if isinstance(one, list) and isinstance(other, list):
        these, those = cast("list[Any]", one), cast("list[Any]", other)
        if len(these) != len(those):
            return f"{place.rstrip('.') or 'body'}: {len(these)} entries and {len(those)}"
        found = (_difference(a, b, f"{place}{index}.") for index, (a, b) in enumerate(zip(these, those, strict=True)))
        return next((told for told in found if told is not None), None)
    if codec.same(one, other):
        return None
    return f"{place.rstrip('.') or 'body'}: {_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
