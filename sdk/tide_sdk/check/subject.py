"""The server under test: one that runs at a URL, or one that this command starts, kills and starts again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from tide_sdk.check.case import Failed, Skipped
from tide_sdk.http_connection import TransportError
from tide_sdk.https import HttpClient, open_client
from tide_sdk.wire import HealthResponse

MAX_WORDS = 2000
_POLL_S = 0.05
_MAX_IN_FLIGHT = 512
HOW_TO_KILL = "the server cannot be killed from here: give its --pid, or let this command start it, after --"


class Unreachable(Exception):
    """There is no server to check; the message says why."""


class Subject(Protocol):
    """A server under test.

    Attributes:
        url: `http(s)://host:port[/prefix]` or `unix:/path`, as it is now.
        client: calls to it.
        token: what it asks for as a bearer token, "" for nothing.
        environment: what it says that it serves.
    """

    url: str
    client: HttpClient
    token: str
    environment: str

    async def open(self) -> None:
        """Start it where it does not run yet, and wait until it is healthy.

        Raises:
            Unreachable: it is not there.
        """
        ...

    async def kill(self) -> None:
        """Kill it as a crash does.

        Raises:
            Skipped: it cannot be killed from here.
        """
        ...

    async def restart(self) -> None:
        """Have it again after a kill.

        Raises:
            Failed: it does not come back.
        """
        ...

    async def terminate(self, limit_s: float) -> int:
        """Send SIGTERM and wait for the exit code.

        Raises:
            Failed: it does not end.
            Skipped: it is not this command's.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections, and end what was started; safe to repeat."""
        ...


class Reached:
    """A server that somebody else runs.

    Args:
        url: where it is.
        boot_s: seconds in which it must answer, at first and after a kill.
        token: bearer token, "" for none.
        pid: its process, killed once where it is given; whoever supervises it starts it again. 0 for none.
    """

    def __init__(self, url: str, boot_s: float, token: str = "", pid: int = 0) -> None:
        self.url = url
        self.token = token
        self.environment = ""
        self.client = _client(url, token)
        self._boot_s = boot_s
        self._pid = pid

    async def open(self) -> None:
        """Wait until it is healthy; see `Subject.open`."""
        self.environment = (await until_healthy(self.client, self._boot_s, _nothing)).environment

    async def kill(self) -> None:
        """Kill the process that was named; see `Subject.kill`."""
        if not self._pid:
            raise Skipped(HOW_TO_KILL)
        pid, self._pid = self._pid, 0
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError as error:
            raise Failed(f"--pid {pid} cannot be killed: {error}") from error

    async def restart(self) -> None:
        """Wait until its supervisor has started it again; see `Subject.restart`."""
        try:
            await self.open()
        except Unreachable as error:
            raise Failed(f"after the kill nobody started the server again: {error}") from error

    async def terminate(self, limit_s: float) -> int:
        """Not ours to stop; see `Subject.terminate`."""
        raise Skipped(HOW_TO_KILL)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.client.aclose()


class Launched:
    """A server that is started from a command, in a process group of its own.

    `{port}` in the command becomes a free port of the loopback address, `{uds}` the path of a socket, `{capacity}` the
    number of tasks. A command without the first two finds the port in its variables PORT and TIDE_PORT.

    Args:
        command: argv.
        boot_s: seconds in which it must be healthy.
        capacity: tasks that it shall hold, in `{capacity}` and TIDE_CAPACITY.
        token: bearer token that it asks for, "" for none.
    """

    def __init__(self, command: Sequence[str], boot_s: float, capacity: int, token: str = "") -> None:
        self.url = ""
        self.token = token
        self.environment = ""
        self._command = tuple(command)
        self._boot_s = boot_s
        self._capacity = capacity
        self._folder = tempfile.TemporaryDirectory(prefix="tide-check-")
        self._log = Path(self._folder.name, "log")
        self._process: subprocess.Popen[bytes] | None = None
        self._num_launches = 0

    async def open(self) -> None:
        """Start it and wait until it is healthy; see `Subject.open`."""
        self._num_launches += 1
        port = _free_port()
        uds = str(Path(self._folder.name, f"{self._num_launches}.sock"))
        values = {"{port}": str(port), "{uds}": uds, "{capacity}": str(self._capacity)}
        argv = [_filled(word, values) for word in self._command]
        own = {"PORT": str(port), "TIDE_PORT": str(port), "TIDE_HOST": "127.0.0.1", "TIDE_PARENT_DEATH": "1"}
        environ = {name: value for name, value in os.environ.items() if name not in ("TIDE_UDS", "TIDE_ENVIRONMENT")}
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: ASYNC220 (it only forks)
                    argv,
                    env=environ | own | {"TIDE_CAPACITY": str(self._capacity)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            words = f"the command cannot be started: {error} (a URL begins with http://, https:// or unix:)"
            raise Unreachable(words) from error
        with_socket = any("{uds}" in word for word in self._command)
        self.url = f"unix:{uds}" if with_socket else f"http://127.0.0.1:{port}"
        self.client = _client(self.url, self.token)
        try:
            self.environment = (await until_healthy(self.client, self._boot_s, self._check_alive)).environment
        except Unreachable as error:
            raise Unreachable(f"{error}{self.last_words()}") from error

    async def kill(self) -> None:
        """Kill it and all that it started; see `Subject.kill`."""
        await self.client.aclose()
        await self._end(signal.SIGKILL, self._boot_s)

    async def restart(self) -> None:
        """Start the command again; see `Subject.restart`."""
        try:
            await self.open()
        except Unreachable as error:
            raise Failed(f"after the kill the command does not come up again: {error}") from error

    async def terminate(self, limit_s: float) -> int:
        """Stop it as a gateway does; see `Subject.terminate`."""
        await self.client.aclose()
        try:
            return await self._end(signal.SIGTERM, limit_s)
        except TimeoutError as error:
            raise Failed(f"SIGTERM did not end it within {limit_s:g} s{self.last_words()}") from error

    async def aclose(self) -> None:
        """Kill what still runs and remove the folder."""
        if self._process is not None:
            await self.client.aclose()
            await self._end(signal.SIGKILL, self._boot_s)
        self._folder.cleanup()

    def last_words(self) -> str:
        """The end of what the server wrote, to put behind an error."""
        words = self._log.read_bytes()[-MAX_WORDS:].decode("utf-8", "backslashreplace").strip()
        return f"; its last words: {words}" if words else "; it wrote nothing"

    async def _end(self, sign: signal.Signals, limit_s: float) -> int:
        process = self._process
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        async with asyncio.timeout(limit_s):
            while process.poll() is None:  # noqa: ASYNC110 (a process sets no event)
                await asyncio.sleep(_POLL_S)
        return process.returncode

    def _check_alive(self) -> None:
        process = self._process
        if process is not None and process.poll() is not None:
            raise Unreachable(f"the command ended with exit code {process.returncode} before it was healthy")


async def until_healthy(client: HttpClient, limit_s: float, check: Callable[[], None]) -> HealthResponse:
    """Wait until the server answers `GET /health` as the contract says, and give the answer.

    Args:
        client: calls to it.
        limit_s: how long to wait.
        check: raises where waiting is of no use any more.

    Raises:
        Unreachable: it does not within the limit.
    """
    words = "no answer"
    try:
        async with asyncio.timeout(limit_s):
            while True:
                check()
                try:
                    response = await client.request("GET", "/health", timeout_s=limit_s)
                    words = f"GET /health answered {response.status}: {response.body[:200].decode('utf-8', 'replace')}"
                    return HealthResponse.model_validate_json(response.body)
                except TransportError as error:
                    words = str(error)
                except ValidationError:
                    pass  # what it said is told once the time is over
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise Unreachable(f"the server was not healthy within {limit_s:g} s: {words}") from None


def _client(url: str, token: str) -> HttpClient:
    headers = {"Authorization": f"Bearer {token}"} if token else None
    try:
        return open_client(url, max_in_flight=_MAX_IN_FLIGHT, headers=headers)
    except ValueError as error:
        raise Unreachable(str(error)) from error


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _nothing() -> None:
    return None
