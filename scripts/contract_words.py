"""What the published schema says beyond `tide_sdk.wire`: the calls, words for fields without any, and examples."""

from __future__ import annotations

from typing import Any

CLOCKS_EXAMPLE = {
    "start": {"limit_s": 60.0, "consumed_s": 0.4, "remaining_s": 59.6},
    "idle": {"limit_s": 600.0, "consumed_s": 0.0, "remaining_s": 600.0},
    "turn": {"limit_s": 120.0, "consumed_s": 0.0, "remaining_s": 120.0},
    "active": {"limit_s": 3600.0, "consumed_s": 0.0, "remaining_s": 3600.0},
    "end": {"limit_s": 10.0, "consumed_s": 0.0, "remaining_s": 10.0},
}
_LIMITS = {"start": 60.0, "idle": 600.0, "turn": 120.0, "active": 3600.0, "end": 10.0}
_TASK_ID = "c0ffee-1"
_TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the secret code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "guess", "arguments": '{"code": "1234"}'}}

BOTH = ["gateway", "environment server"]
CALLS: tuple[dict[str, Any], ...] = (
    {"call": "POST /start", "served_by": BOTH, "request": "StartRequest", "answer": "StartResponse", "status": 201},
    {"call": "POST /observation", "served_by": BOTH, "request": "ObservationRequest", "answer": "ObservationResponse"},
    {"call": "GET /observation?task_id=", "served_by": BOTH, "request": None, "answer": "ObservationResponse"},
    {"call": "POST /pause", "served_by": BOTH, "request": "EpochRequest", "answer": "EpochResponse"},
    {"call": "POST /resume", "served_by": BOTH, "request": "EpochRequest", "answer": "EpochResponse"},
    {"call": "POST /end", "served_by": BOTH, "request": "EndRequest", "answer": "EndResponse"},
    {"call": "GET /health", "served_by": BOTH[1:], "request": None, "answer": "HealthResponse"},
    {"call": "POST /heartbeat", "served_by": BOTH[:1], "request": "HeartbeatRequest", "answer": "HeartbeatResponse"},
    {"call": "GET /capacity", "served_by": BOTH[:1], "request": None, "answer": "CapacityResponse"},
)
"""The contract's calls; the status of a success is 200 where none is named."""

HEAD = (
    "Bodies of the calls in `calls`; every error of every call is a Problem. docs/contract.md is the same contract "
    "in words, with what a schema cannot say: states, repeats, and limits. A request body has at most 16 MiB "
    "(/pause, /resume, /end 64 KiB; environment servers take 32 MiB), `task` 4 MiB and 64 levels, anything 250 "
    "levels. Whole numbers are written without a fraction (1, not 1.0), numbers are finite, text is UTF-8 without "
    "lone surrogates. To check a body, refer to its definition, for example "
    "contract.schema.json#/$defs/StartRequest."
)

FIELDS = {
    "Action.role": "assistant.",
    "Clock.limit_s": "seconds after which the clock has expired; the same for the whole task.",
    "Clock.consumed_s": "seconds counted so far.",
    "Clock.remaining_s": "seconds left, never below 0.",
    "EndRequest.reason": "why the task is ended early, for people; null for no reason. No NUL.",
    "EndRequest.task_id": "the id that /start gave.",
    "EndResponse.reward": "the final score; null after a failure and after an expired start or turn clock.",
    "EndResponse.metrics": "free data for reports.",
    "EndResponse.turns": "turns that were answered.",
    "EndResponse.clocks": "all five clocks by name.",
    "EndResponse.outcome": "how the task ended.",
    "EpochRequest.task_id": "the id that /start gave.",
    "EpochRequest.epoch": "numbered upwards by the caller; one that is not newer changes nothing, none or null applies "
    "to the present state.",
    "EpochResponse.state": "the state after the call.",
    "EpochResponse.epoch": "the newest epoch so far, 0 before the first.",
    "EpochResponse.clocks": "all five clocks by name.",
    "ObservationRequest.task_id": "the id that /start gave.",
    "ObservationRequest.turn": "the number of the turn that the action answers: 0, then what the last answer named.",
    "ObservationRequest.message": "the action.",
    "ObservationResponse.turn": "the number that the next action carries.",
    "ObservationResponse.messages": "what the model sees next; may be empty at the end.",
    "ObservationResponse.clocks": "all five clocks by name.",
    "Outcome.kind": "completed: terminated by the environment. expired: a clock or cap passed. aborted: by the caller.",
    "Outcome.clock": "for expired: the clock, null where an operator's cap passed.",
    "Outcome.reason": "for people; for failed the code of the fault at gateways.",
    "Problem.type": "urn:tide:problem:CODE.",
    "Problem.title": "the code in words.",
    "Problem.status": "the HTTP status.",
    "Problem.code": "stable; callers decide by it. Its status and title are in `codes`.",
    "Problem.detail": "what happened and what the caller can do; for `invalid` it begins with the field and a colon.",
    "StartResponse.task_id": "chosen by the server, unique there; all further calls carry it.",
    "StartResponse.turn": "0: the number of the first action.",
    "StartResponse.messages": "what the model sees first.",
    "StartResponse.tools": "OpenAI tool definitions; [] for none.",
    "StartResponse.limits": "seconds of all five clocks by name, as they hold for this task.",
    "StartResponse.clocks": "all five clocks by name.",
}
"""Words for fields by `Model.field`, where their model's docstring leaves them out or means more."""

PROBLEM_FIELDS = {
    "field": (
        "string",
        "for invalid, too_large and others: the field at fault, for example message.tool_calls.1; body.",
    ),
    "clock": ("string", "for expired and turn_expired: the clock."),
    "outcome": ("object", "for expired and ended, at gateways: how the task ended."),
    "retry_after_s": ("number", "for capacity, paused and unavailable: seconds after which to call again."),
    "reason": ("string", "for capacity: capacity, owner_capacity, owner_tasks, rate or queue_full."),
}
"""Further members that some problems have: name -> (type, words)."""

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "StartRequest": [
        {"environment": "codebreaker", "key": "run/1/0/3"},
        {
            "environment": "codebreaker",
            "key": "run/1/0/4",
            "task": {"length": 4},
            "seed": 7,
            "split": "test",
            "kind": "eval",
            "limits": _LIMITS,
            "attempt": 1,
        },
    ],
    "StartResponse": [
        {
            "task_id": _TASK_ID,
            "turn": 0,
            "messages": [{"role": "user", "content": "I have a secret code."}],
            "tools": [_TOOL],
            "limits": _LIMITS,
            "clocks": CLOCKS_EXAMPLE,
        }
    ],
    "ObservationRequest": [
        {"task_id": _TASK_ID, "turn": 0, "message": {"role": "assistant", "content": "1234"}},
        {"task_id": _TASK_ID, "turn": 1, "message": {"role": "assistant", "content": None, "tool_calls": [_CALL]}},
    ],
    "ObservationResponse": [
        {
            "turn": 1,
            "messages": [{"role": "user", "content": "1234: 1 right, 2 misplaced."}],
            "reward": 0.0,
            "terminated": False,
            "truncated": False,
            "info": {"solved": False},
            "clocks": CLOCKS_EXAMPLE,
        }
    ],
    "EpochRequest": [{"task_id": _TASK_ID, "epoch": 3}, {"task_id": _TASK_ID}],
    "EpochResponse": [{"state": "paused", "epoch": 3, "clocks": CLOCKS_EXAMPLE}],
    "EndRequest": [{"task_id": _TASK_ID}, {"task_id": _TASK_ID, "reason": "the run stops"}],
    "EndResponse": [
        {
            "reward": 1.0,
            "metrics": {"solved": True},
            "turns": 5,
            "clocks": CLOCKS_EXAMPLE,
            "outcome": {"kind": "completed", "clock": None, "reason": None},
        }
    ],
    "HealthResponse": [
        {"contract": 1, "environment": "codebreaker", "capacity": 64, "tasks": 3, "incarnation": "8d1f0c7a"}
    ],
    "HeartbeatRequest": [{"prefix": "run/", "timeout_s": 60.0}],
    "HeartbeatResponse": [{"owner_tasks": 12, "timeout_s": 60.0}],
    "CapacityResponse": [
        {
            "codebreaker": {
                "capacity": 64,
                "taken": 12,
                "free": 50,
                "free_eval": 52,
                "mine": 12,
                "waiting": 0,
                "starts_per_s": 0.0,
            }
        }
    ],
    "Problem": [
        {
            "type": "urn:tide:problem:invalid",
            "title": "The request is not valid",
            "status": 422,
            "code": "invalid",
            "detail": "message.role: must be one of: assistant",
            "field": "message.role",
        }
    ],
}
"""Bodies that are valid, by definition."""
