"""`/start`: the rules of keys and attempts, placement, and the first observation.

    /start -> key rules -> slot -> [commit: starting] -> server -> [commit: instance] -> upstream /start
           -> [commit: waiting, first observation] -> answer

The start goes on when its caller goes away; a repeated call joins it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from tide_gateway import lifecycle, upstream
from tide_gateway.fleet import Fleet
from tide_gateway.rows import Event
from tide_gateway.runtimes import LaunchFailed
from tide_gateway.service import answers
from tide_gateway.service.endings import Endings, failed_start, peer_start
from tide_gateway.service.live import Live, Registry, unfinished
from tide_sdk import codec
from tide_sdk.clocks import ClockName, TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import Outcome, StartRequest


class Starts:
    """Starts tasks.

    Args:
        registry: the open tasks.
        fleets: environment servers by environment.
        endings: ends what a start replaces, and starts that fail.
    """

    def __init__(self, registry: Registry, fleets: Mapping[str, Fleet], endings: Endings) -> None:
        self._registry = registry
        self._fleets = fleets
        self._endings = endings
        self._keys: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}
        self.stopping = False

    async def start(self, owner: str, request: StartRequest, data: dict[str, Any]) -> bytes:
        """Answer `/start`. The same key, attempt and body is the same start, however often it comes.

        Args:
            owner: who calls.
            request: the checked body.
            data: the body as it was parsed, which is what bodies are compared by.
        """
        fleet = self._fleets.get(request.environment)
        if fleet is None:
            known = ", ".join(sorted(self._fleets))
            raise TideError("environment_unknown", f"environment: {request.environment!r} is not one of: {known}")
        async with self._key_lock(owner, request.key):
            live = await self._known(owner, request, data)
            if live is None:
                live = await self._begin(owner, request, data, fleet)
        if live.started is not None:
            stored = await asyncio.shield(live.started)
        else:
            start = await self._registry.repository.start_of(live.task.task_id)
            if start is None or start.answer is None:
                raise failed_start(live.task)
            stored = start.answer
        return answers.with_clocks(stored, live.task, self._registry.time.now_s())

    @asynccontextmanager
    async def _key_lock(self, owner: str, key: str):
        """One decision at a time per key; the lock goes with its last user."""
        lock, users = self._keys.get((owner, key), (asyncio.Lock(), 0))
        self._keys[owner, key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._keys[owner, key]
            if users == 1:
                del self._keys[owner, key]
            else:
                self._keys[owner, key] = (lock, users - 1)

    async def _known(self, owner: str, request: StartRequest, data: dict[str, Any]) -> Live | None:
        """The task that the call repeats; None if it is a new one, for which an older attempt is ended."""
        task = await self._registry.repository.newest_attempt(owner, request.key)
        if task is None:
            return None
        if request.attempt < task.attempt:
            words = f"attempt {request.attempt} of key {request.key!r}: attempt {task.attempt} exists"
            raise TideError("stale_attempt", words, attempt=task.attempt)
        stored = await self._registry.repository.start_of(task.task_id)
        before = codec.loads(stored.request) if stored is not None else {}
        if not answers.same_json(_without_attempt(before), _without_attempt(data)):
            words = f"key {request.key!r} was already used for another start; use a new key"
            raise TideError("key_conflict", words, field="key")
        live = self._registry.lives.get(task.task_id) or self._registry.adopt(task)
        if request.attempt == task.attempt:
            return live
        async with live.lock:
            if lifecycle.is_open(live.task):
                replaced = Outcome(kind="aborted", reason=lifecycle.SUPERSEDED)
                await self._endings.begin(live, replaced, detail=f"attempt {request.attempt} began")
        return None

    async def _begin(self, owner: str, request: StartRequest, data: dict[str, Any], fleet: Fleet) -> Live:
        if self.stopping:
            raise TideError("unavailable", "the gateway is stopping; call again later", retry_after_s=5)
        now_s = self._registry.time.now_s()
        limits = {**fleet.spec.all_limits, **(request.limits or {})}
        task = lifecycle.new_task(
            # Ordered by time, so that pages of tasks and the rows on disk are too.
            task_id=f"{int(now_s * 1000):012x}{secrets.token_hex(8)}",
            owner=owner,
            environment=request.environment,
            key=request.key,
            attempt=request.attempt,
            kind=request.kind,
            limits=limits,
            now_s=now_s,
        )
        fleet.reserve()
        try:
            event = Event("starting", now_s)
            await self._registry.create(task, request=codec.dumps(data), events=(event,))
        except BaseException:
            fleet.give_back(None, task.task_id)
            raise
        live = self._registry.adopt(task)
        live.has_slot = True
        live.started = asyncio.get_running_loop().create_future()
        live.starting = self._registry.spawn(self._run(live, data, fleet), f"tide-start-{task.task_id}")
        return live

    async def _run(self, live: Live, data: dict[str, Any], fleet: Fleet) -> None:
        """The start itself; the sweep cancels it when its clock runs out."""
        try:
            await self._bring_up(live, data, fleet)
        except BaseException:
            if live.started is not None and not live.started.done():
                live.started.set_exception(unfinished())
                live.started.exception()  # the caller may have gone
            raise

    async def _bring_up(self, live: Live, data: dict[str, Any], fleet: Fleet) -> None:
        task = live.task
        try:
            live.host = host = await fleet.place(task.task_id)
            server = host.server
            if server is None:
                raise upstream.EnvironmentLost("the environment server is gone")
            async with live.lock:
                await self._registry.commit(live, lifecycle.placed(live.task, server.name))
                live.server = server
            limit_s = lifecycle.remaining_s(live.task, self._registry.time.now_s()) + 1.0
            body = peer_start(task, server.health.environment, data)
            answer, raw = await upstream.start(server, body, limit_s)
            first = _first_observation(live, raw)
        except (LaunchFailed, upstream.EnvironmentFailed, upstream.EnvironmentLost) as error:
            await self._failed(live, error)
            return
        except TimeoutError:
            return  # the sweep ends the task, with the clock's name
        except TideError as error:
            await self._failed(live, upstream.EnvironmentFailed(0, "", error.detail))
            return
        async with live.lock:
            if live.task.state is not TaskState.STARTING:
                return
            now_s = self._registry.time.now_s()
            after = lifecycle.started(live.task, answer.task_id, now_s)
            event = Event("started", now_s, f"on {live.task.instance}")
            await self._registry.commit(live, after, first=first, events=(event,))
            live.starting = None
        started, live.started = live.started, None
        if started is not None and not started.done():
            started.set_result(first)

    async def _failed(self, live: Live, error: Exception) -> None:
        code, detail = "environment_failed", str(error)
        if isinstance(error, upstream.EnvironmentLost):
            code = "environment_lost"
        elif isinstance(error, upstream.EnvironmentFailed) and error.code == "invalid":
            code, detail = "invalid", error.refused
        async with live.lock:
            if lifecycle.is_open(live.task):
                live.starting = None
                await self._endings.fail(live, code, detail)


def _without_attempt(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "attempt"}


def _first_observation(live: Live, raw: Mapping[str, Any]) -> bytes:
    limits = {name.value: clock.limit_s for name, clock in cast("Mapping[ClockName, Any]", live.task.clocks).items()}
    first = {"task_id": live.task.task_id, "turn": 0, "messages": raw["messages"], "tools": raw["tools"]}
    return codec.dumps(first | {"limits": limits})
