"""Images in messages: the part that carries one, the bytes in its URL, and the reference that stands for them.

    bytes -> image() -> {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
    data URL <-> bytes                 only the plain form above, so that the same bytes give the same URL again
    reference  tide-blob:sha256:<hex>?type=image/png      names the bytes, which are somewhere by that hash

Nothing here decodes pixels: whether a screenshot is whole is for those who look at it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

MAX_IMAGE_BYTES = 16 * 1024 * 1024
"""A larger image is kept by nobody: it stays in its message."""
DATA_MARK = b"data:image/"
"""In JSON without which there is no image in it, whoever wrote it."""
REFERENCE_MARK = b"tide-blob:sha256:"
"""Likewise for references."""
_REFERENCE = re.compile(r"tide-blob:sha256:([0-9a-f]{64})\?type=(image/(?:png|jpeg|webp|gif))\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_DATA = re.compile(r"data:(image/(?:png|jpeg|webp|gif));base64,")
_MAX_PAYLOAD_CHARS = (MAX_IMAGE_BYTES + 2) // 3 * 4


class ImageRef(NamedTuple):
    """What names an image.

    Attributes:
        digest: SHA-256 (hex) of its bytes.
        media_type: image/png, image/jpeg, image/webp or image/gif, which its first bytes say.
    """

    digest: str
    media_type: str

    @property
    def url(self) -> str:
        """The URL that stands for it in an image part."""
        return f"tide-blob:sha256:{self.digest}?type={self.media_type}"


class ImageUnknown(LookupError):
    """An image's bytes are not to be had here any more."""


def image(data: bytes, media_type: str | None = None, *, detail: str | None = None) -> dict[str, Any]:
    """The part of a message that shows an image, for an environment's observation or an agent's own message.

    Args:
        data: a whole PNG, JPEG, WebP or GIF file.
        media_type: what it is, if you want that checked.
        detail: OpenAI's `detail` (low, high, auto), left out where None.

    Raises:
        ValueError: it is none of these, another than `media_type`, or larger than `MAX_IMAGE_BYTES`.
    """
    found = media_type_of(data)
    if found is None:
        raise ValueError("image: the bytes are no PNG, JPEG, WebP or GIF file; convert the image first")
    if media_type is not None and media_type != found:
        raise ValueError(f"image: the bytes are {found}, not {media_type}")
    if len(data) > MAX_IMAGE_BYTES:
        raise ValueError(f"image: {len(data)} bytes; give at most {MAX_IMAGE_BYTES}, or a smaller picture")
    shown = {"url": data_url(data, found)}
    return {"type": "image_url", "image_url": shown if detail is None else shown | {"detail": detail}}


def media_type_of(data: bytes) -> str | None:
    """What an image's first bytes say that it is; None for anything else than the four types."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def digest_of(data: bytes) -> str:
    """The image's name: SHA-256 (hex) of its bytes."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """True for 64 lower-case hex digits."""
    return _DIGEST.match(text) is not None


def data_url(data: bytes, media_type: str) -> str:
    """The image as a URL that holds its bytes."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def read_data_url(url: str) -> bytes | None:
    """The bytes in a data URL of the plain form; None for every other URL.

    Plain: one of the four types, which the bytes are too, standard base64 with its padding, at most
    `MAX_IMAGE_BYTES`. So `data_url` of the bytes is the very same URL.
    """
    head = _DATA.match(url)
    if head is None or len(url) - head.end() > _MAX_PAYLOAD_CHARS:
        return None
    payload = url[head.end() :]
    try:
        data = binascii.a2b_base64(payload, strict_mode=True)
    except (binascii.Error, ValueError):
        return None
    if media_type_of(data) != head[1] or len(data) > MAX_IMAGE_BYTES:
        return None
    # Strict reading still lets the last digit have bits that stand for nothing.
    rest = len(data) % 3 or 3
    return data if base64.b64encode(data[-rest:]).decode() == payload[-4:] else None


def read_reference(url: str) -> ImageRef | None:
    """What a reference names; None for every other URL."""
    found = _REFERENCE.match(url)
    return None if found is None else ImageRef(found[1], found[2])


def url_of(part: Any) -> str | None:
    """The URL of an image part in OpenAI's form; None for every other part."""
    if not isinstance(part, dict):
        return None
    fields = cast("dict[str, Any]", part)
    if fields.get("type") != "image_url" or not isinstance(shown := fields.get("image_url"), dict):
        return None
    url = cast("dict[str, Any]", shown).get("url")
    return url if isinstance(url, str) else None


def image_urls(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The URLs of all image parts, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (url for part in cast("list[Any]", content) if (url := url_of(part)) is not None)


def with_urls(messages: Iterable[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages with the URL of each image part changed; what does not change is shared with them."""
    return [_with_urls(message, change) for message in messages]


def _with_urls(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    old = cast("list[Any]", content)
    new = [_changed(part, change) for part in old]
    same = all(one is other for one, other in zip(old, new, strict=True))
    return message if same else message | {"content": new}


def _changed(part: Any, change: Callable[[str], str]) -> Any:
    url = url_of(part)
    if url is None or (new := change(url)) == url:
        return part
    return part | {"image_url": part["image_url"] | {"url": new}}
