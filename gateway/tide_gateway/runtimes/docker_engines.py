"""One Docker engine: calls with deadlines that never block the event loop, its events, and whether it answers.

    call -> [a slot of the engine] -> a thread -> the engine's API -> answer, EngineRefused or EngineUnreachable
    events thread: connect -> on_connected -> event, event, ... -> broken or silent -> backoff -> connect ...

An engine is healthy while its stream of events is; a call that gets no answer breaks the stream, whose next
connection says whether the engine is back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tide_gateway.runtimes.docker_container import DEPLOYMENT
from tide_gateway.runtimes.docker_sdk import EngineUnreachable, in_thread, open_client, translated

QUICK_S = 15.0
"""Deadline of a call that an engine answers in milliseconds."""
SLOW_S = 60.0
"""Deadline of creating, starting or removing a container on a busy engine."""
_MAX_CALLS = 16
_QUEUE_S = 600.0
_CONNECT_S = 5.0
_SILENCE_S = 30.0
_STEADY_S = 1.0
_MIN_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0

log = logging.getLogger(__name__)


class Engine:
    """One engine; belongs to the event loop that opened it.

    Args:
        url: `unix:///path` or `tcp://host:port`.
        environ: for DOCKER_TLS_VERIFY and DOCKER_CERT_PATH.
        deployment: whose containers' events are read.
        on_connected: told in the loop after each (re)connection, when events may have been missed.
        on_event: told in the loop about each event.
    """

    def __init__(
        self,
        url: str,
        environ: Mapping[str, str],
        deployment: str,
        on_connected: Callable[[Engine], None],
        on_event: Callable[[Engine, dict[str, Any]], None],
    ) -> None:
        self.url = url
        self.healthy = False
        self.why = "not contacted yet"
        self._environ = environ
        self._deployment = deployment
        self._on_connected = on_connected
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(_MAX_CALLS)
        self._contacted = asyncio.Event()
        self._lock = threading.Lock()
        self._client: Any = None
        self._stream: Any = None
        self._platform = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read_events, name="tide-docker-events", daemon=True)
        self._thread.start()

    @property
    def is_local(self) -> bool:
        """It is reached through a socket of this machine, and so sees this machine's folders."""
        return self.url.startswith("unix:")

    async def ready(self) -> None:
        """Wait for the first contact, bounded.

        Raises:
            EngineUnreachable: the engine does not answer now.
        """
        try:
            async with asyncio.timeout(2 * _CONNECT_S):
                await self._contacted.wait()
        except TimeoutError:
            self.why = f"no answer within {2 * _CONNECT_S:g} s"
            self._contacted.set()  # whoever comes next need not wait for it, too
        if not self.healthy:
            raise EngineUnreachable(f"engine {self.url} is down: {self.why}")

    async def call(self, method: str, *args: Any, limit_s: float = QUICK_S, **options: Any) -> Any:
        """Call a method of the library's `APIClient`; see `in_thread` for cancellation.

        Args:
            method: its name.
            limit_s: deadline, counted from when the call is sent.

        Raises:
            EngineRefused: the engine answered with an error.
            EngineUnreachable: no answer in time.
        """
        return await self.run(lambda client: getattr(client, method)(*args, **options), limit_s)

    async def run(self, function: Callable[[Any], Any], limit_s: float) -> Any:
        """As `call`, for a function of the client that reads a stream to its end."""
        try:
            async with asyncio.timeout(_QUEUE_S):
                await self._slots.acquire()
        except TimeoutError:
            raise EngineUnreachable(f"engine {self.url}: {_MAX_CALLS} calls have been waiting for long") from None
        try:
            return await in_thread(lambda: self._with_client(function), limit_s)
        except (TimeoutError, EngineUnreachable) as error:
            self._break(str(error))
            raise EngineUnreachable(f"engine {self.url}: {error}") from error
        finally:
            self._slots.release()

    async def run_long(self, function: Callable[[Any], Any], limit_s: float) -> Any:
        """As `run`, for what takes minutes: it takes no slot from other calls and does not mark the engine as down."""
        try:
            return await in_thread(lambda: self._with_client(function), limit_s)
        except TimeoutError as error:
            raise EngineUnreachable(f"engine {self.url}: {error}") from error

    async def platform(self) -> str:
        """What the engine runs, for example `linux/amd64`."""
        if not self._platform:
            version = await self.call("version", api_version=False)
            self._platform = f"{version.get('Os', 'linux')}/{version.get('Arch', '')}"
        return self._platform

    async def close(self) -> None:
        """Stop reading events. Safe to repeat."""
        self._stopping.set()
        self._break("closed")
        await in_thread(lambda: self._thread.join(_CONNECT_S), 2 * _CONNECT_S)
        if not self._lock.acquire(blocking=False):
            return  # its thread still waits for an engine that says nothing, for longer than a stop may
        try:
            client, self._client = self._client, None
        finally:
            self._lock.release()
        if client is not None:
            client.close()

    def _break(self, why: str) -> None:
        """Not healthy until the stream of events is connected again."""
        self.healthy, self.why = False, why
        stream = self._stream
        if stream is not None:
            try:
                stream.close()
            except Exception as error:  # noqa: BLE001 - the library reaches into sockets that may be gone
                log.debug("engine %s: its stream does not close: %s", self.url, error)

    def _with_client(self, function: Callable[[Any], Any]) -> Any:
        return translated(function, self._connect)

    def _connect(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = open_client(self.url, self._environ, SLOW_S, _MAX_CALLS)
            return self._client

    def _read_events(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while not self._stopping.is_set():
            connected_s, why = None, ""
            try:
                for event in self._open_stream():
                    connected_s = connected_s or time.monotonic()
                    if event is not None:
                        self._tell(self._on_event, self, event)
            except Exception as error:  # noqa: BLE001 - whatever it is, the thread has to live and say so
                why = str(error)[:500]
            if connected_s is not None and time.monotonic() - connected_s > _STEADY_S:
                # It was only silent, or is gone: the next connection says which.
                backoff_s = _MIN_BACKOFF_S
                continue
            self._tell(self._set_health, why or "its stream of events ended")
            self._stopping.wait(backoff_s)
            backoff_s = min(_MAX_BACKOFF_S, 2.0 * backoff_s)

    def _open_stream(self) -> Iterator[dict[str, Any] | None]:
        """None once connected, then the events; silence ends it, since a peer that is gone may say nothing."""
        from docker.types import CancellableStream

        client = self._connect()
        filters = {"type": ["container"], "event": ["die", "destroy", "oom"], "label": [self._label()]}
        response = client.get(
            f"{client.base_url}/v{client.api_version}/events",
            params={"filters": json.dumps(filters)},
            stream=True,
            timeout=(_CONNECT_S, _SILENCE_S),
        )
        with response:
            response.raise_for_status()
            self._stream = CancellableStream(response.iter_lines(chunk_size=None), response)
            self._tell(self._set_health, "")
            yield None
            try:
                for line in self._stream:
                    if line:
                        yield json.loads(line)
            finally:
                self._stream = None

    def _label(self) -> str:
        return f"{DEPLOYMENT}={self._deployment}"

    def _set_health(self, why: str) -> None:
        was = self.healthy
        self.healthy, self.why = not why and not self._stopping.is_set(), why
        if was and why and not self._stopping.is_set():
            log.info("engine %s: %s; connecting again", self.url, why)
        self._contacted.set()
        if self.healthy:
            self._on_connected(self)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has ended, and with it whoever would listen
            self._stopping.set()
