"""What other libraries' environments give, as plain JSON data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

MAX_ITEMS = 4096
"""Numbers of one array that are shown; a larger one is told by its shape."""
MAX_DEPTH = 32
_MAX_WORDS = 2000
_MAX_INT = 2**63


def plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON data: numpy numbers and arrays as numbers and lists, what is not finite or no data as words."""
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, str) else _words(value)
    if isinstance(value, int):
        return int(value) if -_MAX_INT <= value < _MAX_INT else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        members = cast("Mapping[Any, Any]", value)
        return {_words(str(plain(key, depth + 1))): plain(one, depth + 1) for key, one in members.items()}
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) > MAX_ITEMS:
            return f"array of shape {shape}, {value.dtype}"
        listed = value.tolist()
        return str(value) if listed is value else plain(listed, depth + 1)
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (bytes, bytearray)):
        return [plain(one, depth + 1) for one in cast("Sequence[Any]", value)]
    return _words(str(value)[:_MAX_WORDS])


def _words(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
