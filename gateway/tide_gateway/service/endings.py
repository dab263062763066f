"""How tasks end: by `/end`, by an expired clock, by a lost or broken environment; and how they let go of it.

any open state -> [commit: ending, with the outcome] -> waiting calls get their error
                                                     -> release: upstream /end, at most the `end` limit
               -> [commit: ended, with the account]  -> slot given back
done           -> the same release, the task stays done until `/end` reads it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tide_gateway import lifecycle, upstream
from tide_gateway.fleet import Fleet
from tide_gateway.lifecycle import Task
from tide_gateway.rows import Event
from tide_gateway.service import answers
from tide_gateway.service.live import Live, Registry
from tide_sdk import codec
from tide_sdk.clocks import ClockName, TaskState
from tide_sdk.errors import CODES, TideError
from tide_sdk.wire import EndRequest, Outcome

log = logging.getLogger(__name__)


class Endings:
    """Ends tasks and releases their environments.

    Args:
        registry: the open tasks.
        fleets: environment servers by environment.
    """

    def __init__(self, registry: Registry, fleets: Mapping[str, Fleet]) -> None:
        self._registry = registry
        self._fleets = fleets

    async def end(self, owner: str, request: EndRequest) -> bytes:
        """Answer `/end`: end the task if it is open, and give its account. Repeating it gives the same account."""
        live = await self._registry.find(owner, request.task_id)
        async with live.lock:
            await self.expire_if_overdue(live)
            if lifecycle.is_open(live.task):
                reason = request.reason or "ended by the caller"
                outcome = Outcome(kind="aborted", reason=reason)
                await self.begin(live, outcome, detail=reason)
            elif not live.task.released:
                self.release(live)
        if live.releasing is not None and not live.releasing.done():
            # Bounded by the `end` limit inside; other calls may wait for it too.
            await asyncio.wait({live.releasing})
        live = await self._registry.find(owner, request.task_id)
        async with live.lock:
            now_s = self._registry.time.now_s()
            if live.task.state is TaskState.DONE and live.task.released:
                read = lifecycle.read_out(live.task, now_s)
                await self._registry.commit(live, read, events=(Event("ended", now_s),))
            if live.task.state is TaskState.ENDED:
                self._registry.forget(live)
                return answers.end_answer(live.task, now_s)
        raise TideError("unavailable", "the task is still ending; call again", retry_after_s=1)

    async def begin(self, live: Live, outcome: Outcome, *, detail: str = "", error: TideError | None = None) -> None:
        """End an open task; the caller holds its lock. Waiting calls get `error`, or that the task has ended."""
        now_s = self._registry.time.now_s()
        after = lifecycle.ending(live.task, outcome, now_s, detail=detail)
        words = f"{outcome.kind} {outcome.clock or outcome.reason or ''}".strip()
        event = Event("ending", now_s, words + (f": {detail}" if detail and detail != outcome.reason else ""))
        await self._registry.commit(live, after, events=(event,))
        error = error or lifecycle.refusal(after)
        if live.starting is not None:
            live.starting.cancel()
        if live.started is not None and not live.started.done():
            live.started.set_exception(error)
            live.started.exception()  # the caller may have gone
        if live.running is not None:
            live.running.fail(error)
            live.running = None
        self.release(live)

    async def fail(self, live: Live, code: str, detail: str) -> None:
        """End an open task for a fault that is not the agent's; the caller holds its lock. Its reward is null."""
        await self.begin(live, Outcome(kind="failed", reason=code), detail=detail, error=_fault(code, detail))

    async def expire_if_overdue(self, live: Live) -> None:
        """End an open task of which a clock has run out; the caller holds its lock."""
        task = live.task
        clock = lifecycle.overdue(task, self._registry.time.now_s())
        if clock is None or not lifecycle.is_open(task):
            return
        outcome = Outcome(kind="expired", clock=clock)
        error = None
        if clock in (ClockName.TURN, ClockName.ACTIVE) and lifecycle.is_busy(task):
            words = f"the environment acted until the task's {clock.value} clock ran out"
            error = TideError("turn_expired", words, clock=clock.value, turn=task.turn)
        await self.begin(live, outcome, detail=f"limit {task.clocks[clock].limit_s:g} s", error=error)

    async def expire(self, task_id: str) -> None:
        """Deal with a task that the sweep found overdue."""
        live = self._registry.lives.get(task_id)
        if live is None:
            task = await self._registry.repository.task(task_id)
            if task is None:
                return
            live = self._registry.adopt(task)
        async with live.lock:
            await self.expire_if_overdue(live)
            if live.task.state is TaskState.ENDING:
                self.release(live)

    async def lost(self, live: Live, detail: str) -> None:
        """The task's instance is gone; a done task that was not yet released loses its account with it."""
        async with live.lock:
            if lifecycle.is_open(live.task):
                await self.fail(live, "environment_lost", detail)

    def release(self, live: Live) -> None:
        """Begin to let go of the environment, again if it failed; the caller holds the lock."""
        if live.releasing is None or live.releasing.done():
            live.releasing = self._registry.spawn(self._release(live), f"tide-release-{live.task.task_id}")

    async def _release(self, live: Live) -> None:
        account: tuple[float | None, Mapping[str, object]] | None = None
        detail = ""
        limit_s = live.task.clocks[ClockName.END].limit_s
        try:
            account = await self._say_end(live, limit_s)
        except TimeoutError:
            detail = f"the environment did not end within {limit_s:g} s"
            if live.host is not None:
                self._fleets[live.task.environment].condemn(live.host)
        except (upstream.EnvironmentLost, upstream.EnvironmentFailed) as error:
            detail = str(error)
        finally:
            self._give_back(live)
        async with live.lock:
            now_s = self._registry.time.now_s()
            after = lifecycle.released(live.task, account, now_s, detail)
            kind = "ended" if after.state is TaskState.ENDED else "released"
            await self._registry.commit(live, after, events=(Event(kind, now_s, detail),))
        self._registry.forget(live)

    async def _say_end(self, live: Live, limit_s: float) -> tuple[float | None, Mapping[str, object]]:
        """Tell the environment server, and read the account."""
        server, task = live.server, live.task
        if server is None:
            raise upstream.EnvironmentLost(task.detail or "the task had no environment")
        async with asyncio.timeout(limit_s):
            peer_task = task.peer_task
            if not peer_task:
                # The start was under way: repeated, it tells the id by which the task can be ended.
                stored = await self._registry.repository.start_of(task.task_id)
                request = codec.loads(stored.request) if stored is not None else {}
                answer, _ = await upstream.start(
                    server, peer_start(live.task, server.health.environment, request), limit_s
                )
                peer_task = answer.task_id
            reason = (task.outcome.reason or task.outcome.kind) if task.outcome else "completed"
            return await upstream.end(server, peer_task, reason[:1024], limit_s)

    def _give_back(self, live: Live) -> None:
        if live.has_slot:
            live.has_slot = False
            self._fleets[live.task.environment].give_back(live.host, live.task.task_id)
            live.host = None


def peer_start(task: Task, environment: str, request: Mapping[str, object]) -> dict[str, object]:
    """The start as the environment server gets it: its own name for itself, our id as the key, looser limits."""
    limits = {name: clock.limit_s for name, clock in task.clocks.items()}
    body: dict[str, object] = {
        "environment": environment,
        "key": f"{task.task_id}/{task.attempt}",
        "kind": task.kind,
        "limits": upstream.peer_limits(limits),
    }
    return body | {name: request[name] for name in ("task", "seed", "split") if request.get(name) is not None}


def failed_start(task: Task) -> TideError:
    """The error of a start that failed before, for a repeated call."""
    reason = task.outcome.reason if task.outcome else None
    if task.outcome is not None and task.outcome.kind == "failed" and reason in CODES:
        return _fault(reason, task.detail or "the start failed")
    return lifecycle.refusal(task)


def _fault(code: str, detail: str) -> TideError:
    """The error of a failed task; the detail of an `invalid` one begins with its field."""
    extra = {"field": detail.partition(": ")[0]} if code == "invalid" else {}
    return TideError(code, detail, **extra)
