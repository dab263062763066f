"""Idle KV that is lent: how far a rank's tasks may hold more, or less, than its budget.

Where an environment's turn takes longer than the call before it, most live tokens are idle. Keeping them all leaves the
engine with few sequences; giving some up costs their computation again, in time that the engine has. Where calls take
longer than the environment, the engine is the bottleneck: more tasks make nothing faster, and what they compute again
after a pause is lost, so that some of the budget is kept back. The limit follows by itself when calls become slower.
"""

from __future__ import annotations

from tide_trainer.scheduling.settings import CtbSettings

_WEIGHT = 0.01


class IdleLending:
    """Learns seconds of calls at the engine and of environments' turns, over all tasks."""

    __slots__ = ("_acting_s", "_generating_s", "_share")

    def __init__(self, settings: CtbSettings) -> None:
        """Lends and keeps back nothing until both times are known."""
        self._share = settings.idle_lending
        self._acting_s: float | None = None
        self._generating_s: float | None = None

    def observe_generating(self, seconds: float) -> None:
        """A call took so long, from its grant to its answer."""
        self._generating_s = _mean(self._generating_s, seconds)

    def observe_acting(self, seconds: float) -> None:
        """An environment took so long, from the answer to the next call."""
        self._acting_s = _mean(self._acting_s, seconds)

    def factor(self) -> float:
        """Times the budget: what the contexts of a rank's tasks may come to when one more starts or is resumed."""
        if not self._share or self._acting_s is None or self._generating_s is None:
            return 1.0
        cycle_s = self._acting_s + self._generating_s
        return 1.0 + self._share * (self._acting_s - self._generating_s) / cycle_s if cycle_s else 1.0


def _mean(known: float | None, sample: float) -> float:
    return sample if known is None else known + _WEIGHT * (sample - known)
