"""An agent's reward and metrics as plain data: numbers of numeric libraries are taken, what is not JSON is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from tide_sdk import codec
from tide_sdk.errors import told

MAX_METRICS_BYTES = 256 * 1024
"""Bytes of a task's metrics as JSON; beyond them the agent's are left out."""
MAX_DEPTH = 16
_MAX_NOTES = 5


class _Refused(ValueError):
    """The value at this path cannot be written as JSON."""


def real_number(value: Any) -> float:
    """The float that a number stands for: int, float, a numpy or torch scalar, a Decimal.

    Raises:
        TypeError: it is no single real number.
    """
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(value, "__float__"):
        raise TypeError(f"a {type(value).__name__} is no number")
    try:
        return float(value)
    except Exception as error:
        raise TypeError(f"a {type(value).__name__} is no single number: {told(error)}") from error


def is_flag(value: Any) -> bool:
    """True for a bool, also numpy's."""
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def plain_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The entries that are plain JSON data, and what was left out and why.

    Args:
        metrics: what an agent gave; scalars of numeric libraries become numbers, tuples become lists.
    """
    kept: dict[str, Any] = {}
    notes: list[str] = []
    try:
        items = list(metrics.items())
    except Exception as error:  # noqa: BLE001 (an author's mapping)
        return {}, f"metrics are left out: they cannot be read: {told(error)}"
    for name, value in items:
        try:
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - an author's, unchecked
                raise _Refused(f"the name {name!r} is no string")
            kept[name] = _plain(value, name, 0)
            codec.dumps({name: kept[name]})
        except (_Refused, codec.CodecError) as error:
            kept.pop(name, None)
            notes.append(str(error))
        except Exception as error:  # noqa: BLE001 (the methods of an author's object)
            kept.pop(name, None)
            notes.append(f"{str(name)[:80]} cannot be read: {told(error)}")
    size = len(codec.dumps(kept))
    if size > MAX_METRICS_BYTES:
        kept, notes = {}, [f"they take {size} bytes, at most {MAX_METRICS_BYTES}", *notes]
    if not notes:
        return kept, None
    more = f"; and {len(notes) - _MAX_NOTES} more" if len(notes) > _MAX_NOTES else ""
    return kept, "metrics are left out: " + "; ".join(notes[:_MAX_NOTES]) + more


def _plain(value: Any, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _Refused(f"{path[:80]} is nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        if any(not isinstance(key, str) for key, _ in pairs):
            raise _Refused(f"{path[:80]} has keys that are no strings")
        return {key: _plain(item, f"{path}.{key}", depth + 1) for key, item in pairs}
    if isinstance(value, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)]
    if is_flag(value):
        return bool(value)
    try:
        number = real_number(value)
    except TypeError:
        raise _Refused(f"{path[:80]} is a {type(value).__name__}, no plain JSON data") from None
    if not math.isfinite(number):
        raise _Refused(f"{path[:80]} is {number}")
    # An integer of a numeric library stays one.
    return int(value) if hasattr(value, "__index__") else number
