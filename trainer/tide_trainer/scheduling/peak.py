"""The highest use that a rank's tasks are predicted to come to: what admission and resumption look at.

Tasks grow at about the same pace, and one that ends frees all that it holds. So the use is highest at the moment just
before one of them ends: it has its final length then, each longer one has grown by as much, and the shorter are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """What one task holds and will hold.

    Attributes:
        tokens: its footprint now, in whole blocks, the shared prefix included.
        growth_tokens: what is predicted to be added before it ends.
        group: its group.
        shared_tokens: of `tokens`, the prefix that its group holds once; 0 shares nothing.
    """

    tokens: int
    growth_tokens: int
    group: str
    shared_tokens: int


def predicted_peak_tokens(holders: Iterable[Holder]) -> int:
    """The highest predicted use. O(n log n).

    Source: TideRL section 4.2 (admission by footprint). Deviation: the future's highest use decides, not the present.
    """
    peak = own = shared = 0
    groups: set[str] = set()
    ordered = sorted(holders, key=lambda holder: holder.growth_tokens, reverse=True)
    for number, holder in enumerate(ordered, start=1):
        own += holder.tokens - holder.shared_tokens
        if holder.shared_tokens and holder.group not in groups:
            groups.add(holder.group)
            shared += holder.shared_tokens
        peak = max(peak, own + shared + number * holder.growth_tokens)
    return peak
