"""The folder of a run's images: whole files, and removals that never take one which is put at that moment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

_NAME = re.compile(r"[0-9a-f]{64}\Z")


@contextlib.contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Holds the folder's lock: `fcntl.LOCK_SH` to put an image, `fcntl.LOCK_EX` to remove one. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is whole or not there. Raises OSError."""
    handle, part = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def prune(folder: Path, before_s: float, keep: Collection[str]) -> tuple[int, int]:
    """Removes images whose files were last touched before a Unix time, but for those to keep; (how many, their bytes).

    Raises:
        OSError: the folder cannot be read or written.
    """
    num_removed = num_bytes = 0
    names = {name for name in os.listdir(folder) if _NAME.match(name)} if folder.is_dir() else set[str]()
    for name in names.difference(keep):
        path = folder / name
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime >= before_s:
                continue
            # One at a time: nobody who puts an image waits long. It may have been put since the look above.
            with locked(folder, fcntl.LOCK_EX):
                found = path.stat()
                if found.st_mtime < before_s:
                    path.unlink()
                    num_removed, num_bytes = num_removed + 1, num_bytes + found.st_size
    return num_removed, num_bytes
