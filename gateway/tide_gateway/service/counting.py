"""Counts what is committed: how large and slow the groups are, and what becomes of tasks by them."""

from __future__ import annotations

from time import perf_counter

from tide_gateway.committer import Sink
from tide_gateway.database import OutcomeUnknown
from tide_gateway.metrics import Metrics, reason_of
from tide_gateway.repository import Conflict, StorageFailed
from tide_gateway.rows import Change
from tide_sdk.clocks import TaskState


class CountingSink:
    """Commits through another sink.

    Args:
        sink: that one.
        metrics: takes what is counted.
    """

    def __init__(self, sink: Sink, metrics: Metrics) -> None:
        self._sink = sink
        self._metrics = metrics
        self._seconds = metrics.commits.of()
        self._changes = metrics.commit_changes.of()

    async def apply(self, changes: list[Change]) -> list[Exception | None]:
        """See `Sink.apply`."""
        begun_s = perf_counter()
        try:
            outcomes = await self._sink.apply(changes)
        except Exception as error:
            self._metrics.commit_failures.add(_reason(error), by=len(changes))
            raise
        self._seconds.observe(perf_counter() - begun_s)
        self._changes.observe(len(changes))
        for change, failure in zip(changes, outcomes, strict=True):
            if failure is not None:
                self._metrics.commit_failures.add(_reason(failure))
            elif change.result is not None:
                self._metrics.turns.add(change.after.environment)
            elif change.events:
                self._count(change)
        return outcomes

    def _count(self, change: Change) -> None:
        task, outcome = change.after, change.after.outcome
        if change.first is not None:
            self._metrics.started.add(task.environment)
        if outcome is None:
            return
        if task.state is TaskState.ENDED:
            self._metrics.ended.add(task.environment, outcome.kind, reason_of(outcome))
        elif task.state is TaskState.ENDING and outcome.kind == "expired":
            self._metrics.expired.add(task.environment, reason_of(outcome))


def _reason(failure: Exception) -> str:
    match failure:
        case Conflict():
            return "conflict"
        case OutcomeUnknown():
            return "unknown"
        case StorageFailed():
            return "storage"
        case _:
            return "other"
