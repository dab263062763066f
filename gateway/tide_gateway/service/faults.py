"""The errors of tasks that failed for a fault that is not the agent's."""

from __future__ import annotations

from tide_gateway import lifecycle
from tide_gateway.lifecycle import Task
from tide_sdk.errors import CODES, TideError


def failed_start(task: Task) -> TideError:
    """The error of a start that failed before, for a repeated call."""
    reason = task.outcome.reason if task.outcome else None
    if task.outcome is not None and task.outcome.kind == "failed" and reason in CODES:
        return fault(reason, task.detail or "the start failed")
    if lifecycle.is_open(task):
        return TideError("unavailable", "the start goes on; call again", retry_after_s=1)
    return lifecycle.refusal(task)


def fault(code: str, detail: str) -> TideError:
    """The error of a failed task; the detail of an `invalid` one begins with its field."""
    extra = {"field": detail.partition(": ")[0]} if code == "invalid" else {}
    return TideError(code, detail, **extra)
