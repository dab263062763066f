"""Reads the end of an environment server's log file."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from pathlib import Path

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

MAX_TAIL_BYTES = 1024 * 1024


async def read_tail(folder: Path, instance: str, tail_bytes: int) -> bytes | None:
    """The last bytes of `folder/INSTANCE.log`; None where there is no such file.

    Args:
        folder: of the log files.
        instance: the server's name; the caller has made sure that there is, or was, such a server.
        tail_bytes: how many, at most `MAX_TAIL_BYTES`.
    """
    # The name is known already; that it holds no slash is checked once more where a path is made of it.
    if not _FILE.fullmatch(instance):
        return None
    return await asyncio.to_thread(_read, folder / f"{instance}.log", min(tail_bytes, MAX_TAIL_BYTES))


def _read(path: Path, tail_bytes: int) -> bytes | None:
    try:
        # Not through a link, and without waiting for the other end of a pipe.
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(number, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return None
        file.seek(max(0, status.st_size - tail_bytes))
        return file.read(tail_bytes)
