"""What the router tells, and what the scheduler learns of it.

| event | means |
| --- | --- |
| call | a call, or the held report of a loop with its own engine, waits for a grant |
| turn | a granted call was answered |
| passed | a held report was answered: its loop goes on |
| footprint | a loop with its own engine told its tokens |
| call_failed, call_cancelled | an announced call is no more; where another try follows, a new `call` comes |

The events of one session come in their order, one call after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tide_trainer.loop.beliefs import Beliefs
from tide_trainer.loop.episode_clocks import EpisodeClocks
from tide_trainer.loop.flight import CallsInFlight
from tide_trainer.loop.ports import RouterPort
from tide_trainer.loop.shell_task import ShellFigures, ShellTask
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Phase, Report

_WITH_CALL = (Phase.GENERATING, Phase.HELD, Phase.PAUSED)


class RouterEvents:
    """Hands the router's events to the scheduler.

    Args:
        scheduler: the pure scheduler.
        router: asked to refuse calls of tasks that are over.
        tasks: the shell's tasks by session.
        in_flight: granted calls.
        figures: sums.
        now: a monotonic clock in seconds.
        wake: has the scheduler plan soon.
        unpause: resumes a task at the gateway whose waiting call is gone.
        clocks: told when a task waits for the scheduler, and when no longer.
        beliefs: told what is no longer at an engine.
    """

    def __init__(
        self,
        scheduler: TaskScheduler,
        router: RouterPort,
        tasks: Mapping[str, ShellTask],
        in_flight: CallsInFlight,
        figures: ShellFigures,
        now: Callable[[], float],
        wake: Callable[[], None],
        unpause: Callable[[ShellTask], None],
        clocks: EpisodeClocks,
        beliefs: Beliefs,
    ) -> None:
        self._scheduler = scheduler
        self._router = router
        self._tasks = tasks
        self._in_flight = in_flight
        self._figures = figures
        self._now = now
        self._wake = wake
        self._unpause = unpause
        self._clocks = clocks
        self._beliefs = beliefs

    def handlers(self) -> dict[str, Callable[[Any], None]]:
        """By name of event."""
        return {
            "call": self._on_call,
            "turn": self._on_turn,
            "passed": self._on_passed,
            "footprint": self._on_footprint,
            "call_failed": self._on_call_over,
            "call_cancelled": self._on_call_over,
        }

    def _on_call(self, event: Mapping[str, Any]) -> None:
        task = self._tasks.get(event["session"])
        if task is None:
            self._router.refuse(event["call"], "session_closed", "the task is over")
            return
        task.call = event["call"]
        task.asked = event["prompt_tokens"], event["max_new_tokens"]
        self.hold(task)

    def hold(self, task: ShellTask) -> None:
        """The task's call waits for a grant, whatever it did before."""
        task.recalled = None
        self._clocks.stand(task.session)
        with self._figures.measured():
            if self._scheduler.phase(task.session) in (*_WITH_CALL, Phase.REFUSED):
                self._scheduler.on_abort(task.session, self._now())
            self._scheduler.on_call(task.session, *task.asked, self._now())
        self._wake()

    def _over(self, event: Mapping[str, Any]) -> ShellTask | None:
        """A call is no longer at an engine; its task, where that still goes on."""
        call, task = event["call"], self._tasks.get(event["session"])
        self._in_flight.end(call)
        self._beliefs.ended(call)
        if task is not None and task.granted == call:
            task.granted = None
        return task

    def _on_turn(self, event: Mapping[str, Any]) -> None:
        self._figures.add_turn(event["footprint"])
        if event["session"] in self._tasks:
            self._beliefs.answered(event["session"], event["call"], event)
        self._end(event, event["footprint"]["context_tokens"])

    def _on_passed(self, event: Mapping[str, Any]) -> None:
        self._end(event, event["context_tokens"])

    def _end(self, event: Mapping[str, Any], context_tokens: int) -> None:
        if self._over(event) is not None:
            with self._figures.measured():
                self._scheduler.on_turn(event["session"], context_tokens, self._now())
            self._wake()

    def _on_footprint(self, event: Mapping[str, Any]) -> None:
        footprint, superseded = event["footprint"], event["superseded"]
        if not superseded:
            self._figures.add_turn(footprint)
        if event["session"] not in self._tasks:
            return
        context_tokens, growth = footprint["context_tokens"], footprint["growth_tokens"]
        report = Report(
            None if superseded else context_tokens,
            footprint["prompt_tokens"],
            footprint["completion_tokens"],
            None if growth is None else context_tokens + growth,
        )
        with self._figures.measured():
            self._scheduler.on_report(event["session"], report)
        self._wake()

    def _on_call_over(self, event: Mapping[str, Any]) -> None:
        task = self._over(event)
        if event.get("code") == "aborted":
            self._figures.num_aborts += 1
            self._figures.dropped_tokens += event["dropped_tokens"]
        if task is None:
            return
        self._beliefs.released(task.session)
        waited = task.call == event["call"]
        task.call = None if waited else task.call
        phase = self._scheduler.phase(task.session)
        if event.get("retrying"):
            return
        self._clocks.go(task.session)
        if phase not in _WITH_CALL:
            return
        with self._figures.measured():
            # A report's event says with what context its loop goes on, granted or not.
            self._scheduler.on_abort(task.session, self._now(), event.get("context_tokens"))
        if phase is Phase.PAUSED:
            self._unpause(task)
        self._wake()
