"""End every process of a trainer whose main process has died, however it died.

    main --stdin pipe--> guard        end of file = main is gone: SIGTERM was sent by the kernel (`child.py`),
                                      here what is left after the grace gets SIGKILL

Run by file name with `python -I -S`, outside the trainer's session, without the cookie that marks its children. The
kernel's own parent-death signal reaches direct children only; an engine's grandchildren would live on.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import proc  # type: ignore[import-not-found]

GRACE_S = 3.0
_POLL_S = 0.05


def main() -> None:
    """`guard.py COOKIE`: reads `SESSION START_TICKS` and `remove FOLDER` lines to the end of file, then does both."""
    cookie = sys.argv[1]
    leaders: dict[int, int] = {}
    folders: list[str] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the pipe, not with the terminal
    for line in sys.stdin:
        if line.startswith("remove "):
            folders.append(line.removeprefix("remove ").rstrip("\n"))
            continue
        session, ticks = line.split()
        leaders[int(session)] = int(ticks)
    try:
        _end_all(cookie, leaders)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _end_all(cookie: str, leaders: dict[int, int]) -> None:
    end = time.monotonic() + GRACE_S
    proc.send(proc.tree(cookie, leaders), signal.SIGTERM)
    while (left := proc.tree(cookie, leaders)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    while left:
        proc.send(left, signal.SIGKILL)
        time.sleep(_POLL_S)
        left = proc.tree(cookie, leaders)
        if time.monotonic() > end + GRACE_S:
            sys.exit(1)  # only a process in an uninterruptible wait is left


if __name__ == "__main__":
    main()
