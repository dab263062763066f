"""What the OpenAPI document says of each call beside its models: summary, words, and the errors that it can end in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ALWAYS: Final = ("forbidden", "method_not_allowed", "capacity", "internal", "unavailable")
"""Errors of every call."""
WITH_BODY: Final = ("too_large", "media_type", "invalid")
_PAST = ("stale_attempt", "state_conflict", "expired", "ended")
_BROKEN = ("environment_failed", "environment_lost")

REFUSED_BEFORE: Final = {
    400: ("invalid", "This is not an HTTP/1.1 request"),
    408: ("invalid", "The request did not arrive in time"),
    414: ("too_large", "The URL is too long"),
    431: ("too_large", "The header is too large"),
}
"""What a connection answers before it looks at the path: status -> code and words."""

TAGS: Final = [
    {"name": "contract", "description": "The five calls of the contract: what agents and the trainer speak."},
    {"name": "tasks", "description": "What tasks there are, and what happened to them."},
    {"name": "environments", "description": "What can be started, and the servers behind it."},
    {"name": "keys", "description": "Keys and owners, for operators."},
    {"name": "operation", "description": "Health, readiness, metrics and the promises of owners."},
]


@dataclass(frozen=True, slots=True)
class Described:
    """One call.

    Attributes:
        summary: a few words.
        codes: errors beyond `ALWAYS`, and `WITH_BODY` where it takes a body.
        words: a paragraph; empty where the route's own is used.
        needs_key: whether a call without a key is refused.
    """

    summary: str
    codes: tuple[str, ...] = ()
    words: str = ""
    needs_key: bool = True


CALLS: Final[dict[tuple[str, str], Described]] = {
    ("post", "/start"): Described(
        "Start a task",
        ("environment_unknown", "key_conflict", *_PAST, *_BROKEN),
        "Starts a task and answers its first observation. A repeated start with the same key joins the running one or "
        "gets the first answer again. 429 tells when to call again, and keeps a place until then.",
    ),
    ("post", "/observation"): Described(
        "Act",
        ("not_found", "turn_conflict", "turn_order", *_PAST, "paused", *_BROKEN, "turn_expired"),
        "Takes the action of turn `turn` and answers the environment's observation, which carries the next turn. The "
        "same turn with the same message may be repeated at any time: an action never runs twice.",
    ),
    ("get", "/observation"): Described(
        "The latest observation again",
        ("not_found", "invalid", *_PAST),
        "Answers the latest observation again; changes nothing and extends no clock.",
    ),
    ("post", "/pause"): Described(
        "Stop a task's clocks",
        ("not_found", *_PAST),
        "Stops every clock of the task. An epoch that is not newer changes nothing and answers the present state.",
    ),
    ("post", "/resume"): Described(
        "Let a task's clocks go on",
        ("not_found", *_PAST),
        "Lets the clocks of a paused task go on. An epoch that is not newer changes nothing.",
    ),
    ("post", "/end"): Described(
        "End a task and read its account",
        ("not_found", "stale_attempt"),
        "Ends the task in whatever state it is, and answers its account: reward, metrics, turns and outcome. Safe to "
        "repeat.",
    ),
    ("get", "/tasks"): Described("List tasks", ("invalid",)),
    ("get", "/tasks/{task_id}"): Described("One task", ("not_found", "invalid")),
    ("get", "/tasks/{task_id}/events"): Described("A task's history", ("not_found", "invalid")),
    ("get", "/blobs/{digest}"): Described("An image of an observation", ("not_found", "invalid")),
    ("get", "/environments"): Described("List environments"),
    ("get", "/environments/{name}/servers/{instance}/log"): Described(
        "The end of a server's log", ("environment_unknown", "not_found", "invalid")
    ),
    ("get", "/capacity"): Described("Free slots"),
    ("post", "/heartbeat"): Described("Promise to call again"),
    ("get", "/keys"): Described("List keys"),
    ("post", "/keys"): Described("Make a key"),
    ("delete", "/keys/{key_id}"): Described("Revoke a key", ("not_found", "invalid")),
    ("get", "/owners"): Described("List owners with a limit"),
    ("put", "/owners/{owner}"): Described("Set an owner's limit"),
    ("get", "/healthz"): Described("Whether the process answers", needs_key=False),
    ("get", "/readyz"): Described("Whether tasks are served", needs_key=False),
    ("get", "/metrics"): Described("Metrics in Prometheus' text format"),
}
"""By method and path; a test fails where one is missing. Some are only there in gateways that have them."""

WORDS: Final = """The environment gateway of TideRL: environments are hosted, and their tasks served, over five calls.

Errors are `application/problem+json` (RFC 9457) with a stable `code`; `detail` names the field and the fix. `429` and
`503` may be repeated, after `retry_after_s` where it is there."""
