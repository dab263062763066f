"""Files and folders that only the gateway's user reads: they hold the bodies of all owners' tasks."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy.engine import URL

from tide_gateway.database import DatabaseError


def make_private_file(path: Path) -> None:
    """Make an empty file with mode 0600 unless there is one; SQLite gives its log files the mode of the database.

    Raises:
        DatabaseError: it cannot be made or written.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise DatabaseError(
            f"--database sqlite:///{path}: cannot write: {error.strerror}; name another file"
        ) from error


def make_private_folder(path: Path) -> None:
    """Make a folder with mode 0700 in one that exists, unless there is one.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, exist_ok=True)


def data_path(asked: Path | None, url: URL) -> Path:
    """Where the folder of logs and blobs is: as asked, else beside a SQLite file, else in the working folder."""
    data = asked
    if data is None and url.get_backend_name() == "sqlite":
        path = Path(os.path.realpath(str(url.database)))
        data = path.with_name(path.name + "-data")
    return (data or Path("tide-gateway-data")).absolute()


def data_folder(asked: Path | None, url: URL) -> Path:
    """The folder of logs and blobs, made where it is missing; see `data_path`.

    Raises:
        DatabaseError: it cannot be made or written.
    """
    data = data_path(asked, url)
    try:
        # Not its parents: a path that was mistyped shall not come into being.
        for folder in (data, data / "logs", data / "blobs"):
            make_private_folder(folder)
        probe = data / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise DatabaseError(f"--data {data}: cannot be written: {error.strerror}; name another folder") from error
    return data
