"""One example of every request, answer and problem of the OpenAPI document: a task of BabyAI, from start to end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tide_sdk.errors import CODES, TideError

TASK_ID: Final = "01k3zq8f7c4n2r6t9v0w"
KEY: Final = "run-7/step-3/group-2/member-0"
_LIMITS = {"start": 120.0, "idle": 600.0, "turn": 60.0, "active": 3600.0, "end": 10.0}


def _clocks(**consumed: float) -> dict[str, Any]:
    return {
        name: {
            "limit_s": limit_s,
            "consumed_s": consumed.get(name, 0.0),
            "remaining_s": limit_s - consumed.get(name, 0.0),
        }
        for name, limit_s in _LIMITS.items()
    }


_OUTCOME = {"kind": "completed", "clock": None, "reason": None}
_TASK = {
    "task_id": TASK_ID,
    "environment": "babyai",
    "key": KEY,
    "attempt": 0,
    "kind": "train",
    "state": "waiting",
    "turn": 1,
    "epoch": 0,
    "reward": None,
    "outcome": None,
    "clocks": _clocks(start=0.5, idle=2.0, active=3.0),
    "created_at": "2026-01-31T12:00:00+00:00",
}
_OBSERVATION = {
    "turn": 1,
    "messages": [{"role": "user", "content": "You see a red ball 2 steps forward."}],
    "reward": None,
    "terminated": False,
    "truncated": False,
    "info": {"steps": 1},
    "clocks": _clocks(start=0.5, active=2.0),
}
_PAUSED = {"state": "paused", "epoch": 1, "clocks": _clocks(start=0.5, idle=1.0, active=3.0)}
_KEY = {
    "key_id": "3f9a1c07",
    "owner": "ann",
    "role": "agent",
    "label": "laptop",
    "created_s": 1769860800.0,
    "expires_s": 1777636800.0,
    "revoked_s": None,
}
_ENVIRONMENT = {
    "name": "babyai",
    "runtime": "process",
    "capacity": 64,
    "taken": 12,
    "limits": _LIMITS,
    "servers": [{"name": "babyai-5f0c2d", "state": "ready", "pid": 4711, "tasks": 12}],
}

REQUESTS: Final[Mapping[tuple[str, str], Any]] = {
    ("post", "/start"): {"environment": "babyai", "key": KEY, "seed": 3, "kind": "train", "limits": {"idle": 600.0}},
    ("post", "/observation"): {
        "task_id": TASK_ID,
        "turn": 0,
        "message": {"role": "assistant", "content": "go forward"},
    },
    ("post", "/pause"): {"task_id": TASK_ID, "epoch": 1},
    ("post", "/resume"): {"task_id": TASK_ID, "epoch": 2},
    ("post", "/end"): {"task_id": TASK_ID, "reason": "the run was stopped"},
    ("post", "/heartbeat"): {"prefix": "run-7/", "timeout_s": 60.0},
    ("post", "/keys"): {"owner": "ann", "role": "agent", "label": "laptop", "expires_days": 90.0},
    ("put", "/owners/{owner}"): {"max_tasks": 64},
}
"""By method and path; a call that takes no body has none."""

ANSWERS: Final[Mapping[tuple[str, str], Any]] = {
    ("post", "/start"): {
        "task_id": TASK_ID,
        "turn": 0,
        "messages": [{"role": "user", "content": "Your mission: go to the red ball."}],
        "tools": [],
        "limits": _LIMITS,
        "clocks": _clocks(start=0.5),
    },
    ("post", "/observation"): _OBSERVATION,
    ("get", "/observation"): _OBSERVATION,
    ("post", "/pause"): _PAUSED,
    ("post", "/resume"): _PAUSED | {"state": "waiting", "epoch": 2},
    ("post", "/end"): {
        "reward": 0.9,
        "metrics": {"steps": 7},
        "turns": 7,
        "clocks": _clocks(start=0.5, active=41.0),
        "outcome": _OUTCOME,
    },
    ("post", "/heartbeat"): {"owner_tasks": 12, "timeout_s": 60.0},
    ("get", "/tasks"): {"tasks": [_TASK], "next": None},
    ("get", "/tasks/{task_id}"): _TASK,
    ("get", "/tasks/{task_id}/events"): [{"kind": "started", "at_s": 1769860800.5, "detail": ""}],
    ("get", "/blobs/{digest}"): "the bytes of a PNG file",
    ("get", "/environments"): [_ENVIRONMENT],
    ("get", "/environments/{name}/servers/{instance}/log"): "serving babyai\n",
    ("get", "/capacity"): {
        "babyai": {
            "capacity": 64,
            "taken": 12,
            "free": 48,
            "free_eval": 52,
            "mine": 12,
            "waiting": 0,
            "starts_per_s": 10.0,
        }
    },
    ("get", "/keys"): [_KEY],
    ("post", "/keys"): _KEY | {"key": "tide_3f9a1c07_SECRET"},
    ("delete", "/keys/{key_id}"): _KEY | {"revoked_s": 1769864400.0},
    ("get", "/owners"): [{"owner": "ann", "max_tasks": 64}],
    ("put", "/owners/{owner}"): {"owner": "ann", "max_tasks": 64},
    ("get", "/healthz"): {"status": "ok", "replica": "9c2e41d7"},
    ("get", "/readyz"): {
        "status": "ready",
        "replica": "9c2e41d7",
        "database": "up",
        "runtimes": {"process": "up"},
    },
    ("get", "/metrics"): "# HELP tide_gateway_ready 1 while /readyz answers 200.\ntide_gateway_ready 1.0\n",
}
"""By method and path; each shows its one success."""

_PROBLEMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "unauthorized": ("send the header Authorization: Bearer KEY", {}),
    "forbidden": ("this needs a key of role operator; yours has role agent", {"role": "operator"}),
    "not_found": (f"no task '{TASK_ID}' of yours", {}),
    "environment_unknown": ("environment: 'babyay' is not one of: babyai", {}),
    "method_not_allowed": ("/start takes POST", {"allow": "POST"}),
    "turn_conflict": ("turn 0 was already taken with another message", {"turn": 0}),
    "turn_order": ("turn 5 is out of order: turn 1 is next", {"turn": 1}),
    "key_conflict": (f"key: {KEY!r} was already used for another start", {"field": "key"}),
    "stale_attempt": (f"attempt 0 of key {KEY!r} was replaced by a higher one", {}),
    "state_conflict": ("the task is still starting", {"state": "starting"}),
    "expired": (
        "the task's idle clock has expired",
        {"clock": "idle", "outcome": {"kind": "expired", "clock": "idle"}},
    ),
    "ended": (
        "the task has ended: aborted (the run was stopped)",
        {"outcome": {"kind": "aborted", "reason": "the run was stopped"}},
    ),
    "too_large": ("body: it may have at most 16777216 bytes", {"field": "body", "max_bytes": 16777216}),
    "media_type": ("send the body with Content-Type: application/json", {}),
    "invalid": ("turn: Input should be a valid integer", {"field": "turn", "num_errors": 1}),
    "paused": ("the task is paused; call again after /resume", {"epoch": 1}),
    "capacity": ("all 64 slots are taken", {"reason": "capacity", "retry_after_s": 2.5}),
    "internal": ("an unexpected failure; see the gateway's log", {}),
    "environment_failed": ("the environment answered turn 1 with turn 4", {}),
    "environment_lost": ("the environment server is gone", {}),
    "unavailable": ("the gateway is stopping; call again later", {"retry_after_s": 5}),
    "turn_expired": ("the turn clock expired while the environment acted", {"clock": "turn", "turn": 1}),
}


def problem(code: str) -> dict[str, Any]:
    """An example of an error."""
    detail, extra = _PROBLEMS[code]
    return TideError(code, detail, **extra).problem().model_dump()


def problems() -> dict[str, Any]:
    """An example of every error, by its code, as OpenAPI lists examples."""
    return {code: {"summary": title, "value": problem(code)} for code, (_, title) in CODES.items()}
