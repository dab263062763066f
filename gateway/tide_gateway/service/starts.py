"""`/start`: the rules of keys and attempts, admission, placement, and the first observation.

    /start -> [commit: admitted, starting, on a living server] -> healthy server -> upstream /start
           -> [commit: waiting, first observation] -> answer
      key is known -> key rules: the same start, or an older attempt is ended
      no server is as good as a new one, or none has room -> [commit: instance] (`placing`)

The start goes on when its caller goes away; a repeated call joins it, here or on the replica that runs it. A replica
that dies in it leaves a row from which another one takes it over.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, cast

from tide_gateway import lifecycle, upstream
from tide_gateway.admission import Refuse
from tide_gateway.fleet import Fleet
from tide_gateway.lifecycle import ASLEEP_S, Task
from tide_gateway.log_lines import working_on
from tide_gateway.repository import StorageFailed
from tide_gateway.repository.instances import StaleTask
from tide_gateway.repository.slots import KeyTaken, rules_of
from tide_gateway.rows import Change, Event
from tide_gateway.runtimes import LaunchFailed
from tide_gateway.service import answers, pictures
from tide_gateway.service.endings import Endings
from tide_gateway.service.faults import failed_start
from tide_gateway.service.following import Looks
from tide_gateway.service.live import Live, Registry, unfinished
from tide_gateway.service.placing import Placing
from tide_gateway.service.start_keys import StartKeys
from tide_sdk import codec
from tide_sdk.clocks import ClockName, TaskState
from tide_sdk.errors import TideError
from tide_sdk.images import DATA_MARK
from tide_sdk.wire import StartRequest


class Starts:
    """Starts tasks.

    Args:
        registry: the open tasks.
        fleets: environment servers by environment.
        endings: ends what a start replaces, and starts that fail.

    Attributes:
        admitting: ids of tasks whose first row is being written, and which are about to be worked on.
    """

    def __init__(self, registry: Registry, fleets: Mapping[str, Fleet], endings: Endings) -> None:
        self._registry = registry
        self._fleets = fleets
        self._endings = endings
        self._keys = StartKeys(registry, endings)
        self._placing = Placing(registry)
        self._admitting: set[asyncio.Future[Any]] = set()
        self.admitting: set[str] = set()
        self.stopping = False

    async def start(self, owner: str, request: StartRequest, data: dict[str, Any]) -> bytes:
        """Answer `/start`. The same key, attempt and body is the same start, however often it comes.

        Args:
            owner: who calls.
            request: the checked body.
            data: the body as it was parsed, which is kept and passed on.
        """
        fleet = self._fleets.get(request.environment)
        if fleet is None:
            known = ", ".join(sorted(self._fleets))
            raise TideError("environment_unknown", f"environment: {request.environment!r} is not one of: {known}")
        async with self._keys.lock(owner, request.key):
            # Most keys are new: that one is not is found out by its admission, which has to look anyway.
            found: Live | int = -1
            if self.stopping or not fleet.may_start:
                found = await self._keys.known(owner, request)
            while isinstance(found, int):
                try:
                    found = await self._begin(owner, request, data, fleet, found)
                except KeyTaken:
                    found = await self._keys.known(owner, request)
            live = found
        working_on.set(live)
        if live.started is not None and live.started.done():
            live.started = None  # how it ended is in the row
        if live.started is None and live.task.state is TaskState.STARTING:
            self._join(live, data, fleet)
        if live.started is not None:
            stored = await asyncio.shield(live.started)
        else:
            stored = await self._stored(live.task)
        return answers.with_clocks(stored, live.task, self._registry.time.now_s())

    def take_over(self, live: Live, request: bytes) -> None:
        """Go on with a start that a dead replica left; the caller holds the lock and has committed it as ours."""
        if live.starting is not None:
            live.starting.cancel()
        if live.started is None:
            live.started = asyncio.get_running_loop().create_future()
        self._go(live, codec.loads(request), self._fleets[live.task.environment])

    async def _begin(self, owner: str, request: StartRequest, data: dict[str, Any], fleet: Fleet, known: int) -> Live:
        if self.stopping:
            raise TideError("unavailable", "the gateway is stopping; call again", retry_after_s=1)
        fleet.check()
        now_s = self._registry.time.now_s()
        task = lifecycle.new_task(
            # Ordered by time, so that pages of tasks and the rows on disk are too.
            task_id=f"{int(now_s * 1000):012x}{secrets.token_hex(8)}",
            owner=owner,
            environment=request.environment,
            key=request.key,
            attempt=request.attempt,
            kind=request.kind,
            limits={**fleet.spec.all_limits, **(request.limits or {})},
            now_s=now_s,
            worker=self._registry.me,
            max_pause_s=fleet.spec.max_pause_s or ASLEEP_S,
            max_wall_s=fleet.spec.max_wall_s or ASLEEP_S,
        )
        self.admitting.add(task.task_id)
        try:
            task = await self._admit(task, data, fleet, known)
            if self._registry.closed:
                raise unfinished()  # its row ends with the others, or is another replica's to go on with
            return self._spawn(task, data, fleet)
        finally:
            self.admitting.discard(task.task_id)

    def _spawn(self, task: Task, data: dict[str, Any], fleet: Fleet) -> Live:
        live = self._registry.adopt(task)
        live.started = asyncio.get_running_loop().create_future()
        self._go(live, data, fleet)
        return live

    def _go(self, live: Live, data: dict[str, Any], fleet: Fleet) -> None:
        live.follows = False
        working_on.set(live)
        live.starting = self._registry.spawn(self._run(live, data, fleet), f"tide-start-{live.task.task_id}")

    async def settle(self) -> None:
        """Return when no new row is being written any more; `stopping` is set before. The caller sets the deadline."""
        while self._admitting:
            await asyncio.wait(self._admitting)

    async def _admit(self, task: Task, data: dict[str, Any], fleet: Fleet, known: int) -> Task:
        """Commit the task's first row, if a slot and the rate allow it; the row."""
        change = Change(task, request=codec.dumps(data), events=(Event("starting", task.created_s),))
        write = asyncio.ensure_future(
            self._registry.repository.slots.admit(
                change,
                rules_of(fleet.spec, fleet.capacity),
                self._endings.releases(task.environment),
                task.created_s,
                known=known,
                host=fleet.spec,
                may_launch=fleet.may_launch,
            )
        )
        self._admitting.add(write)
        write.add_done_callback(self._admitting.discard)
        try:
            verdict = await asyncio.shield(write)
        except asyncio.CancelledError:
            # The caller went away; what was admitted must not stay without anybody who works on it.
            write.add_done_callback(lambda done: self._admitted_for_nobody(done, data, fleet))
            raise
        except StorageFailed as error:
            raise self._registry.unwritten(task.task_id, error) from error
        if isinstance(verdict, Refuse):
            self._registry.metrics.refused.add(task.environment, verdict.reason)
            raise TideError("capacity", verdict.detail, reason=verdict.reason, retry_after_s=verdict.retry_after_s)
        return verdict

    def _admitted_for_nobody(self, done: asyncio.Future[Task | Refuse], data: dict[str, Any], fleet: Fleet) -> None:
        if done.cancelled() or done.exception() is not None or self._registry.closed:
            return
        if isinstance(task := done.result(), Task):
            self._spawn(task, data, fleet)

    async def _run(self, live: Live, data: dict[str, Any], fleet: Fleet) -> None:
        """The start itself; the sweep cancels it when its clock runs out."""
        try:
            await self._bring_up(live, data, fleet)
        except BaseException:
            live.fail_start(unfinished())
            raise

    async def _bring_up(self, live: Live, data: dict[str, Any], fleet: Fleet) -> None:
        try:
            answer, raw = await self._placing.start_somewhere(live, data, fleet)
            first, images = _first_observation(live, raw), ()
            if DATA_MARK in first:
                first, images = await asyncio.to_thread(pictures.taken_out, first)
        except (LaunchFailed, upstream.EnvironmentFailed, upstream.EnvironmentLost) as error:
            await self._failed(live, error)
            return
        except TimeoutError:
            return  # the sweep ends the task, with the clock's name
        except StaleTask:
            await self._superseded(live)
            return
        except TideError as error:
            await self._failed(live, upstream.EnvironmentFailed(0, "", error.detail))
            return

        async def started() -> bool:
            if live.task.state is not TaskState.STARTING or live.task.worker != self._registry.me:
                return False
            now_s = self._registry.time.now_s()
            after = lifecycle.started(live.task, answer.task_id, now_s)
            event = Event("started", now_s, f"on {live.task.instance}")
            await self._registry.commit(live, after, first=first, events=(event,), images=images)
            return True

        if not await self._registry.decide(live, started):
            await self._superseded(live)
            return
        self._finish(live, first)

    async def _superseded(self, live: Live) -> None:
        """The task's row is another's: whoever waits here gets what becomes of it there."""
        live.follows = True
        await self._placing.read_again(live)
        await self._until_started(live)

    def _join(self, live: Live, data: dict[str, Any], fleet: Fleet) -> None:
        """Wait for a start that is under way elsewhere, or go on with one of ours that a fault broke off."""
        live.started = asyncio.get_running_loop().create_future()
        if live.starting is not None and not live.starting.done():
            return  # it tells whoever waits
        if live.task.worker == self._registry.me:
            self._go(live, data, fleet)
            return
        live.follows = True
        live.starting = self._registry.spawn(self._until_started(live), f"tide-follow-{live.task.task_id}")

    async def _until_started(self, live: Live) -> None:
        """Look until the start is over; the start clock, kept by every replica's sweep, bounds it."""
        looks = Looks()
        try:
            while live.task.state is TaskState.STARTING:
                await looks.pause()
                await self._placing.read_again(live)
            self._finish(live, await self._stored(live.task))
        except TideError as error:
            live.fail_start(error)
        except BaseException:
            live.fail_start(unfinished())
            raise

    def _finish(self, live: Live, first: bytes) -> None:
        live.starting = None
        started, live.started = live.started, None
        if started is not None and not started.done():
            started.set_result(first)

    async def _stored(self, task: Task) -> bytes:
        start = await self._registry.repository.start_of(task.task_id)
        if start is None or start.answer is None:
            raise failed_start(task)
        return start.answer

    async def _failed(self, live: Live, error: Exception) -> None:
        code, detail = "environment_failed", str(error)
        if isinstance(error, upstream.EnvironmentLost):
            code = "environment_lost"
        elif isinstance(error, upstream.EnvironmentFailed) and error.code == "invalid":
            code, detail = "invalid", error.refused

        async def fail() -> bool:
            if live.task.state is not TaskState.STARTING or live.task.worker != self._registry.me:
                return False
            live.starting = None
            await self._endings.fail(live, code, detail)
            return True

        if not await self._registry.decide(live, fail):
            await self._superseded(live)


def _first_observation(live: Live, raw: Mapping[str, Any]) -> bytes:
    limits = {name.value: clock.limit_s for name, clock in cast("Mapping[ClockName, Any]", live.task.clocks).items()}
    first = {"task_id": live.task.task_id, "turn": 0, "messages": raw["messages"], "tools": raw["tools"]}
    return codec.dumps(first | {"limits": limits})
