"""Numbers as people read them, for the live view and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

MISSING = "–"


def number(record: Any, key: str) -> float | None:
    """A field of a mapping as a finite number; None if it is missing, null or not a number."""
    value = record.get(key) if isinstance(record, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def numbers_of(record: Any, key: str) -> dict[str, float]:
    """A field that maps names to numbers; what is not a number is left out."""
    value = record.get(key) if isinstance(record, Mapping) else None
    if not isinstance(value, Mapping):
        return {}
    found = {str(name): number(value, name) for name in value}
    return {name: amount for name, amount in found.items() if amount is not None}


def percent(value: float | None) -> str:
    """A fraction in percent, whole unless it is below 1%."""
    if value is None:
        return MISSING
    scaled = 100 * value
    return f"{scaled:.1f}%" if 0 < abs(scaled) < 1 else f"{scaled:.0f}%"


def count(value: float | None) -> str:
    """A whole number with thousands separated."""
    return MISSING if value is None else f"{value:,.0f}"


def quantity(value: float | None) -> str:
    """A number with three significant digits; thousands as k, millions as M."""
    if value is None:
        return MISSING
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}"


def seconds(value: float | None) -> str:
    """Seconds of CPU or wall time: 0.42 s, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if value is None:
        return MISSING
    if value < 10:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value) // 60} min {int(value) % 60:02d} s"
    return f"{int(value) // 3600} h {int(value) % 3600 // 60:02d} min"


def stopwatch(value: float | None) -> str:
    """Seconds as 2:05 or 1:02:05."""
    if value is None:
        return "-:--"
    total = max(0, int(value))
    hours, minutes = total // 3600, total % 3600 // 60
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"


def size_of(value: float | None) -> str:
    """Bytes as MiB or GiB."""
    if value is None:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def moment(iso: str) -> str:
    """An ISO timestamp as 2025-11-04 09:30 UTC; text that is no timestamp stays as it is."""
    try:
        parsed = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return f"{(parsed.astimezone(UTC) if parsed.tzinfo else parsed):%Y-%m-%d %H:%M} UTC"
