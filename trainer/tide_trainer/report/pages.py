"""What the pages share: their templates and files, their one allowed script, and whole files or none."""

from __future__ import annotations

import base64
import hashlib
import os
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from tide_trainer.errors import TrainerError


class ReportFailed(TrainerError):
    """A page cannot be written; the message names the file and the reason."""


def templates() -> Environment:
    """The templates of `page/`; all that they are given is escaped, and a missing name is an error."""
    return Environment(
        loader=PackageLoader("tide_trainer.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page_file(name: str) -> str:
    """The text of a file in `page/`."""
    return (resources.files("tide_trainer.report") / "page" / name).read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """What a content security policy calls an inline script by."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def write_page(target: Path, page: str) -> Path:
    """Replaces a page in one move, so that a reader never sees half of it; returns its path.

    Raises:
        ReportFailed: the disk is full or the folder cannot be written.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8", errors="replace")
        partial.replace(target)
    except OSError as error:
        try:
            partial.unlink(missing_ok=True)
        finally:
            raise ReportFailed(f"{target}: cannot be written ({error.strerror}); free or fix the folder") from error
    return target
