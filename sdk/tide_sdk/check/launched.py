"""A server that is started from a command, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tide_sdk.check.case import Failed
from tide_sdk.check.subject import Unreachable, client_of, until_healthy

MAX_WORDS = 2000
"""Bytes of what the server wrote that are told."""
_POLL_S = 0.05


class Launched:
    """A server that is started from a command, in a process group of its own.

    In the command `{port}` becomes a free port of the loopback address `{host}`, `{uds}` the path of a socket, the same
    each time, `{announce}` a file in which the server tells its URL, `{capacity}` the number of tasks. A command
    without port, socket and file finds the port in its variable TIDE_PORT (and in PORT).

    Args:
        command: argv.
        boot_s: seconds in which it must be healthy.
        capacity: tasks that it shall hold, in `{capacity}` and TIDE_CAPACITY.
        token: bearer token that it asks for, "" for none.
    """

    def __init__(self, command: Sequence[str], boot_s: float, capacity: int, token: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tide-check-")
        self._uds = str(Path(self._folder.name, "env.sock"))
        self.url = f"unix:{self._uds}"
        self.token = token
        self.client = client_of(self.url, token)
        self.environment = ""
        self._command = tuple(command)
        self._boot_s = boot_s
        self._capacity = capacity
        self._log = Path(self._folder.name, "log")
        self._announce = Path(self._folder.name, "announce.json")
        self._process: subprocess.Popen[bytes] | None = None

    async def open(self) -> None:
        """Start it and wait until it is healthy; see `Subject.open`."""
        port = _free_port()
        self._announce.unlink(missing_ok=True)
        self._start(port)
        try:
            if self._names("{announce}"):
                self.url = await self._announced()
            else:
                self.url = f"unix:{self._uds}" if self._names("{uds}") else f"http://127.0.0.1:{port}"
            self.client = client_of(self.url, self.token)
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
        finally:
            await self._end(signal.SIGKILL, self._boot_s)  # also what it started and left behind

    async def aclose(self) -> None:
        """Kill what still runs and remove the folder."""
        await self.client.aclose()
        if self._process is not None:
            await self._end(signal.SIGKILL, self._boot_s)
        self._folder.cleanup()

    def last_words(self) -> str:
        """The end of what the server wrote, to put behind an error."""
        with self._log.open("rb") as log:  # which may be longer than the memory
            log.seek(max(0, self._log.stat().st_size - MAX_WORDS))
            words = log.read(MAX_WORDS).decode("utf-8", "backslashreplace").strip()
        return f"; its last words: {words}" if words else "; it wrote nothing"

    def _start(self, port: int) -> None:
        values = {"{port}": str(port), "{host}": "127.0.0.1", "{uds}": self._uds, "{announce}": str(self._announce)}
        argv = [_filled(word, values | {"{capacity}": str(self._capacity)}) for word in self._command]
        own = {"PORT": str(port), "TIDE_PORT": str(port), "TIDE_HOST": "127.0.0.1", "TIDE_PARENT_DEATH": "1"}
        environ = {name: value for name, value in os.environ.items() if name != "TIDE_UDS"}
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
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

    def _names(self, placeholder: str) -> bool:
        return any(placeholder in word for word in self._command)

    async def _announced(self) -> str:
        try:
            async with asyncio.timeout(self._boot_s):
                while not self._announce.exists():
                    self._check_alive()
                    await asyncio.sleep(_POLL_S)
            return str(json.loads(self._announce.read_bytes())["url"])
        except TimeoutError:
            raise Unreachable(f"the command has announced no URL within {self._boot_s:g} s") from None
        except (ValueError, TypeError, KeyError) as error:
            raise Unreachable(f'the announced file is not {{"url": "http://..."}}: {error}') from error

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


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
