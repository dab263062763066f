"""Images of a run as its pages need them: files named by the SHA-256 of their bytes."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

MAX_IMAGE_BYTES = 32 * 1024 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


def keep_image(folder: Path, data: bytes) -> str:
    """Keeps an image and returns its digest; the same bytes again change nothing.

    Raises:
        OSError: it is empty, too large, or the folder cannot be written.
    """
    if not 0 < len(data) <= MAX_IMAGE_BYTES:
        raise OSError(f"an image of {len(data)} bytes; 1 to {MAX_IMAGE_BYTES} are kept")
    digest = hashlib.sha256(data).hexdigest()
    path = folder / digest
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{digest}.{os.getpid()}"
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return digest


def read_image(folder: Path, digest: str) -> tuple[bytes, str]:
    """An image's bytes and media type, as its first bytes tell it.

    Raises:
        OSError: it is not there, too large, damaged, or none of PNG, JPEG, GIF and WebP.
    """
    if not _DIGEST.match(digest):
        raise OSError("the name is no digest")
    try:
        with open(folder / digest, "rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except FileNotFoundError as error:
        raise OSError("the file is missing") from error
    if len(data) > MAX_IMAGE_BYTES:
        raise OSError(f"the file is larger than {MAX_IMAGE_BYTES >> 20} MiB")
    if hashlib.sha256(data).hexdigest() != digest:
        raise OSError("the file's bytes are not those of its name")
    media_type = next((found for magic, found in _MAGIC if data.startswith(magic)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        media_type = "image/webp"
    if not media_type:
        raise OSError("the file is no PNG, JPEG, GIF or WebP image")
    return data, media_type
