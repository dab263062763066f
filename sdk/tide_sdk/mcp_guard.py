"""Runs one MCP server so that nothing of it outlives the environment server that asked for it (Linux).

    environment server --stdin, stdout--> guard (leads the process group, dies after its parent) --> MCP server

Run as a script, alone and without the package, since one is started for each task:
`mcp_guard.py PARENT_PID NAME,NAME,... PROGRAM ARGUMENT...`; the names are the variables that the server gets.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

GRACE_S = 2
"""Seconds between the request to end and the kill."""
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Run the program to its end, then kill what it left in its process group, this process with it."""
    parent, names, command = int(arguments[0]), arguments[1].split(","), arguments[2:]
    guard = os.getpid()
    if os.getpgrp() != guard:
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _end_group)
    signal.signal(signal.SIGALRM, _kill_group)
    _die_with(parent, signal.SIGTERM)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _die_with(guard, signal.SIGKILL)
        _become(command, {name: os.environ[name] for name in names if name in os.environ})
    # The pipes are the server's alone, so that its end is seen at once.
    os.close(0)
    os.close(1)
    os.waitpid(child, 0)
    _kill_group(0, None)


def _become(command: list[str], environment: dict[str, str]) -> None:
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 (no shell is meant)
    except (OSError, ValueError) as error:
        os.write(2, f"cannot run {command[0]!r}: {error}\n".encode("utf-8", "backslashreplace"))
        os._exit(127)


def _die_with(parent: int, number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


def _end_group(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(GRACE_S)
    os.killpg(0, signal.SIGTERM)


def _kill_group(number: int, frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
