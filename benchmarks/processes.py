"""Runs one command of a benchmark in its own process group, with a deadline and a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 30.0
POLL_S = 0.1


def run_command(
    argv: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Runs a command in the project's root until it ends.

    A deadline or Ctrl-C sends SIGINT to the command, and SIGKILL to its group where it has not ended in 30 s.

    Args:
        argv: the command.
        log: takes its output.
        timeout_s: seconds that it may take.
        env: variables on top of this process's.
        watch: called ten times a second while it runs, and once after.

    Raises:
        RuntimeError: it failed or was late; the message ends with the end of its log.
    """
    deadline_s = time.monotonic() + timeout_s
    with open(log, "wb") as output:
        child = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while child.poll() is None and time.monotonic() < deadline_s:
                watch()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
        finally:
            _end(child)
    watch()
    if child.returncode:
        end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(argv[:4])} ... ended with {child.returncode}; its log, {log}, ends:\n{end}")


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
