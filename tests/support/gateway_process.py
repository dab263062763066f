"""One gateway process at an address that stays the same over its restarts."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START_S = 60.0
STOP_S = 60.0
POLL_S = 0.02
NUM_LOG_CHARS = 5000


@dataclass(slots=True)
class Replica:
    """A gateway's place, and its process once it was started.

    Attributes:
        number: from 0, its place in the cluster.
        port: stays over restarts; `holder` keeps it.
        announce: the file that the gateway writes once it answers.
        log: takes the output of all its runs.
    """

    number: int
    port: int
    announce: Path
    log: Path
    holder: socket.socket
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers, also after a restart."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """The id of its process, the last one where it is dead."""
        assert self.process is not None, f"replica {self.number} was not started"
        return self.process.pid

    def start(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the process; `wait_ready` waits for it."""
        self.announce.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environ), start_new_session=True
            )

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until the process has announced itself.

        Raises:
            AssertionError: it ended, or was late and is killed now; the message has its log.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.announce.exists():
            if not self.running or time.monotonic() > deadline_s:
                code = None if self.process is None else self.process.poll()
                self.kill()
                raise AssertionError(f"replica {self.number} is not ready (exit code {code}):\n{self._last_words()}")
            time.sleep(POLL_S)
        told = json.loads(self.announce.read_text())["url"]
        assert told == self.url, f"replica {self.number} serves {told}, not {self.url}"

    def send(self, number: int) -> None:
        """Send a signal, and do not wait. A process that hangs goes on, so that it can obey; not for SIGSTOP."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
                if number != signal.SIGSTOP:
                    self.process.send_signal(signal.SIGCONT)

    def kill(self) -> bool:
        """SIGKILL; True if it lived. Returns once it is dead."""
        if not self.running or self.process is None:
            return False
        self.process.kill()
        self.process.wait(timeout=STOP_S)
        return True

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = STOP_S) -> int | None:
        """Stop the process by a signal and return its exit code; None where it was not started.

        Raises:
            AssertionError: it did not end in time; it was killed then.
        """
        if self.process is None:
            return None
        self.send(number)
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"replica {self.number} did not stop in {timeout_s:g} s and was killed:\n{self._last_words()}"
            ) from None

    def text(self) -> str:
        """All that it has logged, its earlier runs included."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def free_port(self) -> None:
        """Give the port back; safe to repeat."""
        self.holder.close()

    def _last_words(self) -> str:
        return self.text()[-NUM_LOG_CHARS:]


def place(folder: Path, number: int) -> Replica:
    """A replica with a port of its own, not started."""
    # Bound and never listening: nobody else gets the port while the gateway is down, and the gateway still can.
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    name = f"replica-{number}"
    return Replica(number, holder.getsockname()[1], folder / f"{name}.json", folder / f"{name}.log", holder)
