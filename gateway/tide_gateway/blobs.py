"""Large bodies as files named by their content's hash, so that a screenshot costs SQL one short reference.

A stored body is a JSON object and so begins with a brace; a reference begins with `blob:`. Files are written before the
row that names them is committed; the same content is the same file.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

MAX_INLINE_BYTES = 8 * 1024
_MARK = b"blob:"


class BlobStore:
    """Keeps large bodies in a folder.

    Args:
        folder: made when the first large body comes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, body: bytes) -> bytes:
        """What the row holds for `body`: itself, or the reference of the file that now holds it."""
        if len(body) <= MAX_INLINE_BYTES:
            return body
        name = hashlib.sha256(body).hexdigest()
        path = self._path(name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{name}.{secrets.token_hex(4)}.part")
            try:
                part.write_bytes(body)
                os.replace(part, path)
            except OSError:
                # On a full disk the half of a body takes the room of others.
                part.unlink(missing_ok=True)
                raise
        return _MARK + name.encode()

    def get(self, stored: bytes) -> bytes:
        """The body that a row's value stands for.

        Raises:
            FileNotFoundError: the blob's file was removed.
        """
        if not stored.startswith(_MARK):
            return stored
        return self._path(stored[len(_MARK) :].decode()).read_bytes()

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name
