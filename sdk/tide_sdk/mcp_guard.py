"""Runs one MCP server so that nothing of it outlives the environment server that asked for it (Linux).

    environment server -------------- stdin ---------------> MCP server
                       <-- messages -- guard <-- stdout ----     |      the guard leads the process group and dies after
                       <------------------ stderr ----------------      its parent

Of what the server prints only messages are passed on: a line that is none, or has no end, would cost everybody's tasks
the environment server's time, log and memory.

Run as a script, alone and without the package, since one is started for each task:
`mcp_guard.py PARENT_PID NAME,NAME,... PROGRAM ARGUMENT...`; the names are the variables that the server gets.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from types import FrameType

GRACE_S = 2
"""Seconds between the request to end and the kill."""
MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer message ends the server."""
MAX_NOISE_BYTES = 64 * 1024
"""Of lines that are no messages; so much is told on stderr."""
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
    source, sink = os.pipe()
    woken = _woken_by_children()
    child = os.fork()
    if child == 0:
        os.dup2(sink, 1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _die_with(guard, signal.SIGKILL)
        _become(command, {name: os.environ[name] for name in names if name in os.environ})
    # The other ends are the server's alone, so that its end is seen at once.
    os.close(0)
    os.close(sink)
    if not _relayed(source, woken, child):
        os.close(1)
        os.waitpid(child, 0)
    _kill_group(0, None)


class Messages:
    """Takes what the server prints, and passes its messages on.

    Args:
        target: where they go, a file descriptor.
        noise: where lines that are none go.
    """

    def __init__(self, target: int, noise: int) -> None:
        self._target, self._noise = target, noise
        self._line = bytearray()
        self._num_noise = 0

    def take(self, data: bytes) -> bool:
        """False where the line is too long."""
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._line += piece
            self._send()
        self._line += rest
        if len(self._line) <= MAX_LINE_BYTES:
            return True
        _write(self._noise, f"the MCP server printed a message of more than {MAX_LINE_BYTES} bytes\n".encode())
        return False

    def _send(self) -> None:
        line = bytes(self._line)
        self._line.clear()
        if line.lstrip()[:1] in (b"{", b"["):
            _write(self._target, line + b"\n")
        elif line.strip() and self._num_noise < MAX_NOISE_BYTES:
            told = line[: MAX_NOISE_BYTES - self._num_noise]
            self._num_noise += len(told)
            _write(self._noise, b"no message: " + told + b"\n")


def _relayed(source: int, woken: int, child: int) -> bool:
    """Pass on what the server prints until it ends (True), closes its output, or is asked to end (False)."""
    messages = Messages(1, 2)
    try:
        while True:
            ready = select.select((source, woken), (), ())[0]
            if woken in ready:
                os.read(woken, 4096)
                if os.waitpid(child, os.WNOHANG)[0]:
                    while select.select((source,), (), (), 0)[0] and (data := os.read(source, 1 << 16)):
                        if not messages.take(data):
                            break
                    return True
            if source in ready:
                data = os.read(source, 1 << 16)
                if not data:
                    return False
                if not messages.take(data):
                    break
    except BrokenPipeError:
        return False  # nobody reads any more: the server is about to be asked to end
    _end_group(0, None)
    return False


def _woken_by_children() -> int:
    """What can be read once a child has ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader


def _write(target: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(target, left) :]


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
