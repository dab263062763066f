"""What a person is shown: an environment's words, made safe for a terminal; images as files."""

from __future__ import annotations

import base64
import binascii
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tide_sdk.play.typed import function_of, parameters_of
from tide_sdk.wire import Clock

MAX_CHARS = 20_000
MAX_IMAGE_BYTES = 32 * 1024 * 1024
_ENDINGS = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}
_DATA = re.compile(r"data:([a-z]+/[a-z0-9.+-]{1,40})(?:;[a-z0-9=-]{1,40})*;base64,", re.IGNORECASE)
_JOINERS = frozenset("\u200c\u200d")
"""Format characters that writing needs; the others turn text around or hide it."""


def safe(text: str) -> str:
    """The text without anything that a terminal would obey: such characters are written out, as `\\x1b` is.

    Line feeds and tabs stay. Escapes, other control characters, marks that turn the direction of writing or cannot be
    seen, and lone surrogates do not.
    """
    return "".join(char if _harmless(char) else _written_out(char) for char in text)


def cut(text: str, most: int = MAX_CHARS) -> str:
    """The text, or its beginning and how much is left out."""
    return text if len(text) <= most else f"{text[:most]} [... {len(text) - most:,} characters more]"


class Shown:
    """Makes lines of messages; an image becomes a file in a folder.

    Args:
        folder: where images are written; made with the first.
        colour: whether our own words are set off in colour.
    """

    def __init__(self, folder: Path, *, colour: bool) -> None:
        self._folder = folder
        self._colour = colour
        self._num_images = 0

    def message(self, message: Mapping[str, Any]) -> str:
        """A chat message, its role above it."""
        lines = [self.own(f"[{safe(str(message.get('role', '?')))}]")]
        content: Any = message.get("content")
        parts = cast("list[Any]", content) if isinstance(content, list) else [content] if content else []
        lines += [self._part(part) for part in parts]
        calls: Any = message.get("tool_calls")
        for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
            function = function_of(cast("dict[str, Any]", call) if isinstance(call, dict) else {})
            lines.append(safe(cut(f"calls {function.get('name')}({function.get('arguments', '')})")))
        return "\n".join(lines)

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The tools with their arguments."""
        lines = list[str]()
        for function in map(function_of, tools):
            schema: Any = function.get("parameters")
            needed: Any = cast("Mapping[str, Any]", schema).get("required") if isinstance(schema, Mapping) else ()
            required = set(map(str, cast("Sequence[Any]", needed))) if isinstance(needed, (list, tuple)) else set[str]()
            arguments = [
                f"{name}{'' if name in required else '?'}: {one.get('type', 'any')}"
                for name, one in parameters_of(function).items()
            ]
            told = str(function.get("description") or "").strip()
            lines.append(f"  {function.get('name', '?')}({', '.join(arguments)})" + (f"  {told}" if told else ""))
        return safe(cut("\n".join(lines)))

    def clocks(self, clocks: Mapping[Any, Clock]) -> str:
        """The clocks, each with what is left of it."""
        return ", ".join(
            f"{safe(str(name))} {clock.remaining_s:.0f} of {clock.limit_s:.0f} s left" for name, clock in clocks.items()
        )

    def data(self, data: Mapping[str, Any]) -> str:
        """Plain data in a line."""
        return safe(cut(json.dumps(data, ensure_ascii=False, default=str), 2000))

    def own(self, text: str) -> str:
        """Words of the command itself, safe already."""
        return f"\x1b[2m{text}\x1b[0m" if self._colour else text

    def _part(self, part: Any) -> str:
        if isinstance(part, str):
            return safe(cut(part))
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {"type": "?"}
        if fields.get("type") == "text":
            return safe(cut(str(fields.get("text", ""))))
        inner: Any = fields.get("image_url")
        url: Any = cast("dict[str, Any]", inner).get("url") if isinstance(inner, dict) else inner
        if fields.get("type") != "image_url" or not isinstance(url, str):
            return self.data(fields)
        return self._image(url)

    def _image(self, url: str) -> str:
        found = _DATA.match(url)
        if found is None:
            return f"[image at {safe(cut(url, 500))}]"
        if len(url) > MAX_IMAGE_BYTES * 4 // 3:
            return f"[image of more than {MAX_IMAGE_BYTES:,} bytes, not saved]"
        try:
            body = base64.b64decode(url[found.end() :], validate=True)
        except (binascii.Error, ValueError):
            return "[image that is not base64]"
        self._num_images += 1
        path = self._folder / f"image-{self._num_images}.{_ENDINGS.get(found[1].lower(), 'bin')}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        except OSError as error:
            return f"[image of {len(body):,} bytes, which cannot be written to {path}: {error.strerror}]"
        return f"[image: {path}]"


def _harmless(char: str) -> bool:
    if char in "\n\t":
        return True
    category = unicodedata.category(char)
    return category not in ("Cc", "Cs", "Cf", "Zl", "Zp") or char in _JOINERS


def _written_out(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
