"""Large bodies, and images, as files named by their content's hash, so that they cost SQL one short reference.

A stored body is a JSON object and so begins with a brace; a reference begins with `blob:`. Files are written before the
row that names them is committed; the same content is the same file.

    put, keep -> touch the file, or write it where there is none -> the row is committed within a transaction's time
    find_old  -> touched by nobody for long -> the caller takes out what rows name
    remove    -> moved aside -> touched since? put back : deleted

Whoever names a file touches it first, so that one which was moved aside untouched is named by no row to come; a file
that was moved aside first is written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

MAX_INLINE_BYTES = 8 * 1024
GRACE_S = 3600.0
"""A file younger than that is never removed: far longer than a transaction lasts, and than clocks differ."""
_MARK = b"blob:"
REFERENCE_BYTES = len(_MARK) + 64
_PREFIX = re.compile("[0-9a-f]{2}")
_NAME = re.compile("[0-9a-f]{64}")
_ASIDE, _PART = ".out", ".part"


@dataclass(frozen=True, slots=True)
class Old:
    """Files that may be removed where no row names them.

    Attributes:
        names: their hashes.
        before_s: they were last touched before that moment of the folder's own clock.
    """

    names: set[str]
    before_s: float


class BlobStore:
    """Keeps large bodies in a folder.

    Args:
        folder: made when the first large body comes.
        durable: a body survives a power cut, as the row does that names it; each one then waits for the disk.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self._folder = folder
        self._durable = durable

    def put(self, body: bytes) -> bytes:
        """What the row holds for `body`: itself, or the reference of the file that now holds it."""
        if len(body) <= MAX_INLINE_BYTES:
            return body
        name = hashlib.sha256(body).hexdigest()
        self.keep(name, body)
        return _MARK + name.encode()

    def keep(self, name: str, body: bytes) -> None:
        """Keep a body of any size, of which the caller knows the hash."""
        path = self._path(name)
        try:
            os.utime(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{name}.{secrets.token_hex(4)}{_PART}")
            try:
                self._write(part, body)
                os.replace(part, path)
            except OSError:
                # On a full disk the half of a body takes the room of others.
                part.unlink(missing_ok=True)
                raise
        if self._durable:
            # Also of a file that another call has just moved here.
            for folder in (path.parent, self._folder):
                _sync(folder)

    def get(self, stored: bytes) -> bytes:
        """The body that a row's value stands for.

        Raises:
            FileNotFoundError: the blob's file was removed.
        """
        name = name_in(stored)
        return stored if name is None else self.read(name)

    def read(self, name: str) -> bytes:
        """What was kept under a hash.

        Raises:
            FileNotFoundError: its file was removed.
        """
        path = self._path(name)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            # Moved aside, by a removal that will put it back, or was killed.
            for aside in path.parent.glob(f"{name}.*{_ASIDE}"):
                with contextlib.suppress(FileNotFoundError):
                    return aside.read_bytes()
            return path.read_bytes()

    def find_old(self, age_s: float) -> Old:
        """The files that nobody has named for so long; what a crash left in the folder is tidied up.

        Args:
            age_s: seconds; `GRACE_S` or more, but in tests. The folder's clock counts, on a network another machine's.

        Raises:
            OSError: the folder cannot be read or written.
        """
        if not self._folder.is_dir():
            return Old(set(), 0.0)
        old = Old(set(), self._now_s() - age_s)
        for prefix in sorted(name for name in os.listdir(self._folder) if _PREFIX.fullmatch(name)):
            with os.scandir(self._folder / prefix) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        self._look_at(entry, old)
        return old

    def remove(self, old: Old) -> int:
        """Remove old files that no row named when it was looked for, after `find_old`; how many.

        Raises:
            OSError: one cannot be moved or deleted.
        """
        num_removed = 0
        for name in old.names:
            path = self._path(name)
            aside = path.with_name(f"{name}.{secrets.token_hex(4)}{_ASIDE}")
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, aside)
                if aside.stat().st_mtime < old.before_s:
                    aside.unlink()
                    num_removed += 1
                else:
                    os.replace(aside, path)
        return num_removed

    def _write(self, path: Path, body: bytes) -> None:
        path.write_bytes(body)
        if self._durable:
            # Before it gets its name: of a file that was only named a power cut may leave an empty one.
            _sync(path)

    def _look_at(self, entry: os.DirEntry[str], old: Old) -> None:
        touched_s = entry.stat(follow_symlinks=False).st_mtime
        if entry.name.endswith(_ASIDE):
            # A removal was killed, or is another gateway's: it may be named by a row, and counts as touched.
            os.utime(entry.path)
            os.replace(entry.path, self._path(entry.name.partition(".")[0]))
        elif touched_s < old.before_s and _NAME.fullmatch(entry.name):
            old.names.add(entry.name)
        elif touched_s < old.before_s and entry.name.endswith(_PART):
            os.unlink(entry.path)

    def _now_s(self) -> float:
        probe = self._folder / f".clock-{secrets.token_hex(4)}"
        probe.touch(0o600)
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def name_in(stored: bytes) -> str | None:
    """The hash that a row's value refers to, None where it is the body itself."""
    return stored[len(_MARK) :].decode() if stored.startswith(_MARK) else None
