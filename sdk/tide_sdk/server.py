"""The environment server: the contract's endpoints over one `Environment` class, as a plain ASGI app.

    request -> route -> parse -> ServedTask -> the author's instance (inline, on the loop, or in its thread) -> answer

Back-pressure: `capacity` live tasks, then 429 with Retry-After. A sweep ends tasks whose clocks have expired.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from tide_sdk import codec
from tide_sdk.asgi import (
    WHOLE,
    ClientGone,
    Receive,
    Scope,
    Send,
    check_version,
    parse_json,
    read_body,
    send_json,
    send_problem,
    validate,
)
from tide_sdk.clocks import ClockName, TaskState
from tide_sdk.environment import Environment
from tide_sdk.errors import TideError
from tide_sdk.instance import Instance
from tide_sdk.served_task import ServedTask
from tide_sdk.task_rules import DEFAULT_LIMITS
from tide_sdk.wire import CONTRACT_VERSION, EndRequest, EpochRequest, ObservationRequest, StartRequest

_log = logging.getLogger("tide_sdk.server")
_Handler = Callable[[Scope, Receive], Awaitable[tuple[int, bytes]]]
SWEEP_EVERY_S = 0.5
MAX_SMALL_BODY_BYTES = 64 * 1024
"""Of the calls that carry neither a message nor a task's parameters."""
CLOSE_LIMIT_S = 1.5
"""Seconds that a stopping server gives its tasks to release what they hold; a gateway kills it after 2."""


class EnvironmentServer:
    """ASGI app that serves one environment class.

    Args:
        environment: the author's class; one instance of it is made for each task.
        options: keyword arguments of its `__init__`.
        capacity: tasks held at once; None takes the class's own.
        limits: seconds of each clock where a start names none.
        max_remembered: released tasks whose answers can still be asked for; the oldest are forgotten first.
        max_remembered_bytes: of their answers together, the newest task's not counted.
        max_body_bytes: a larger request is refused with 413.
        now: a monotonic clock in seconds, for tests.
    """

    def __init__(
        self,
        environment: type[Environment],
        *,
        options: Mapping[str, Any] | None = None,
        capacity: int | None = None,
        limits: Mapping[ClockName, float] | None = None,
        max_remembered: int = 4096,
        max_remembered_bytes: int = 64 * 1024 * 1024,
        max_body_bytes: int = 32 * 1024 * 1024,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = environment.name or environment.__name__
        self.capacity = environment.capacity if capacity is None else capacity
        self.incarnation = secrets.token_hex(16)
        self._class = environment
        self._options = dict(options or {})
        self._limits = {**DEFAULT_LIMITS, **(limits or {})}
        self._max_remembered = max_remembered
        self._max_remembered_bytes = max_remembered_bytes
        self._num_remembered_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._now = now
        self._tasks: dict[str, ServedTask] = {}
        self._keys: dict[str, ServedTask] = {}
        self._live: dict[str, ServedTask] = {}
        self._released: OrderedDict[str, ServedTask] = OrderedDict()
        self._stopping = False
        self._routes: dict[str, dict[str, _Handler]] = {
            "/observation": {"POST": self._observation, "GET": self._latest},
            "/start": {"POST": self._start},
            "/pause": {"POST": self._pause},
            "/resume": {"POST": self._resume},
            "/end": {"POST": self._end},
            "/health": {"GET": self._health},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        try:
            status, body = await self._handler(scope)(scope, receive)
        except TideError as error:
            await send_problem(send, error)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 (the boundary: logged, and told to the caller)
            _log.exception("%s %s failed", scope["method"], scope["path"])
            await send_problem(send, TideError("internal", f"{type(error).__name__} in the environment server"))
        else:
            await send_json(send, status, body, whole=scope.get(WHOLE))

    def _handler(self, scope: Scope) -> _Handler:
        methods = self._routes.get(scope["path"])
        if methods is None:
            raise TideError("not_found", f"no endpoint {scope['path']!r}; there are {', '.join(self._routes)}")
        handler = methods.get(scope["method"])
        if handler is None:
            allow = ", ".join(methods)
            raise TideError("method_not_allowed", f"{scope['path']} takes {allow}", allow=allow)
        return handler

    # endpoints

    async def _observation(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        body = await read_body(scope, receive, self._max_body_bytes)
        request = validate(ObservationRequest, parse_json(body))
        return 200, await self._task(request.task_id).observe(request.turn, body, request.message)

    async def _latest(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        check_version(scope)
        ids = parse_qs(scope["query_string"].decode("latin-1")).get("task_id", [])
        if len(ids) != 1:
            raise TideError("invalid", "task_id: give it once in the query", field="task_id")
        return 200, self._task(ids[0]).latest()

    async def _start(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        body = await read_body(scope, receive, self._max_body_bytes)
        task = self._find_or_start(validate(StartRequest, parse_json(body)))
        return 201, await task.started()

    async def _pause(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        request = validate(EpochRequest, parse_json(await self._small_body(scope, receive)))
        return 200, await self._task(request.task_id).pause(request.epoch, pause=True)

    async def _resume(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        request = validate(EpochRequest, parse_json(await self._small_body(scope, receive)))
        return 200, await self._task(request.task_id).pause(request.epoch, pause=False)

    async def _end(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        request = validate(EndRequest, parse_json(await self._small_body(scope, receive)))
        return 200, await self._task(request.task_id).end(request.reason)

    async def _small_body(self, scope: Scope, receive: Receive) -> bytes:
        return await read_body(scope, receive, min(MAX_SMALL_BODY_BYTES, self._max_body_bytes))

    async def _health(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        check_version(scope)
        health = {"contract": CONTRACT_VERSION, "environment": self.name, "capacity": self.capacity}
        return 200, codec.dumps(health | {"tasks": len(self._live), "incarnation": self.incarnation})

    # the table of tasks

    def _task(self, task_id: str) -> ServedTask:
        task = self._tasks.get(task_id)
        if task is None:
            raise TideError("not_found", "task_id: this server knows no such task", field="task_id")
        return task

    def _find_or_start(self, request: StartRequest) -> ServedTask:
        older = self._keys.get(request.key)
        if older is not None and older.start_failed and request.attempt >= older.request.attempt:
            older = None
        if older is not None:
            if request.attempt < older.request.attempt:
                raise TideError("stale_attempt", f"attempt {older.request.attempt} of this key has started")
            if request.attempt == older.request.attempt:
                if not codec.same(request.model_dump(mode="json"), older.request.model_dump(mode="json")):
                    raise TideError("key_conflict", "key: it was already used for another start", field="key")
                return older
        if self._stopping:
            raise TideError("unavailable", "the server stops", retry_after_s=1)
        frees_one = older is not None and older.task_id in self._live
        if len(self._live) - frees_one >= self.capacity:
            raise TideError("capacity", f"all {self.capacity} places are taken", reason="capacity", retry_after_s=1)
        if older is not None:
            older.superseded = True
        task_id = secrets.token_hex(16)
        instance = Instance(self._class, self._options)
        limits = {**self._limits, **(request.limits or {})}
        task = ServedTask(task_id, request, instance, limits, self._now, self._on_closed)
        self._tasks[task_id] = self._keys[request.key] = self._live[task_id] = task
        task.launch(after=older)
        return task

    def _on_closed(self, task: ServedTask) -> None:
        self._live.pop(task.task_id, None)
        self._released[task.task_id] = task
        self._num_remembered_bytes += task.num_bytes
        while len(self._released) > self._max_remembered or (
            self._num_remembered_bytes > self._max_remembered_bytes and len(self._released) > 1
        ):
            task_id, oldest = self._released.popitem(last=False)
            self._num_remembered_bytes -= oldest.num_bytes
            del self._tasks[task_id]
            if self._keys.get(oldest.request.key) is oldest:
                del self._keys[oldest.request.key]

    # running

    def sweep(self) -> None:
        """End every task that has an expired clock."""
        for task in list(self._live.values()):
            task.sweep()

    async def aclose(self) -> None:
        """Take no more tasks and end every live one, within a few seconds; calls that wait for it get 410. Once."""
        if self._stopping:
            return
        self._stopping = True
        live = [task for task in self._live.values() if task.state is not TaskState.DONE]
        if live:
            ends = [asyncio.create_task(task.end("the server stops")) for task in live]
            await asyncio.wait(ends, timeout=CLOSE_LIMIT_S)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self.sweep()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        sweeper = asyncio.create_task(self._sweep_forever())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await sweeper
        await self.aclose()
        await send({"type": "lifespan.shutdown.complete"})
