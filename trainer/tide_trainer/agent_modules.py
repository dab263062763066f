"""Where the modules that a configuration names are looked for: beside it too, not only among what is installed."""

from __future__ import annotations

import sys
from pathlib import Path


def make_importable(folder: str) -> None:
    """Make modules of the working directory and of `folder` importable in this process; idempotent.

    Args:
        folder: the configuration's, empty for none.
    """
    sys.path[:0] = [path for path in _places(folder) if path not in sys.path]


def where_looked(folder: str) -> str:
    """The places of `make_importable`, for an error."""
    return f"looked in {', '.join(_places(folder))} and what is installed"


def _places(folder: str) -> list[str]:
    return list(dict.fromkeys([str(Path.cwd()), *([str(Path(folder).resolve())] if folder else [])]))
