"""Files and folders that only the gateway's user reads: they hold the bodies of all owners' tasks."""

from __future__ import annotations

import os
from pathlib import Path


def make_private_file(path: Path) -> None:
    """Make an empty file with mode 0600 unless there is one; SQLite gives its log files the mode of the database.

    Raises:
        OSError: it cannot be made.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def make_private_folder(path: Path) -> None:
    """Make a folder with mode 0700 unless there is one.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
