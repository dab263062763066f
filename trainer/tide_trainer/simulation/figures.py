"""What a play comes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One workload under one policy.

    Attributes:
        time_s: from the start to the last task's end.
        num_prompt_tokens, num_cached_tokens: of all calls, when first scheduled.
        num_ideal_cached_tokens: what a cache that forgets nothing would have held of them.
        hit_rate_worst_window: lowest hit rate of a window of 10 s with at least 1% of all prompt tokens.
        num_prefilled_tokens: computed prompt tokens; `num_ideal_prefilled_tokens` with the perfect cache.
        num_recomputed_tokens: of the prefilled ones, those of preempted calls.
        num_pauses: Pause decisions.
        num_refused: tasks larger than a cache or a budget, ended.
        longest_pause_s: the longest wait of a paused task.
        busy_fraction: share of the time in which an engine was in a step, mean over ranks.
    """

    time_s: float
    num_tasks: int
    num_calls: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_ideal_cached_tokens: int
    hit_rate_worst_window: float
    num_prefilled_tokens: int
    num_recomputed_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_pauses: int
    num_refused: int
    busy_fraction: float
    longest_pause_s: float

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over prompt tokens, summed before dividing."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def ideal_hit_rate(self) -> float:
        """The hit rate of a cache that forgets nothing."""
        return self.num_ideal_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def num_ideal_prefilled_tokens(self) -> int:
        """What a cache that forgets nothing would leave to compute."""
        return self.num_prompt_tokens - self.num_ideal_cached_tokens

    @property
    def prefill_over_ideal(self) -> float:
        """Computed prompt tokens over those that even a perfect cache leaves."""
        return self.num_prefilled_tokens / max(1, self.num_ideal_prefilled_tokens)

    @property
    def tasks_per_minute(self) -> float:
        """Finished tasks per minute of virtual time."""
        return 60.0 * self.num_tasks / self.time_s if self.time_s else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        """Generated tokens per second, all ranks together."""
        return self.num_generated_tokens / self.time_s if self.time_s else 0.0


def worst_window(samples: Iterable[tuple[float, int, int]]) -> float:
    """The lowest part / whole of a window of `WINDOW_S`, of those with at least 1% of the wholes' sum.

    Args:
        samples: (time, whole, part).

    Returns:
        1.0 without such a window.
    """
    windows: dict[int, tuple[int, int]] = {}
    total = 0
    for at_s, whole, part in samples:
        seen, got = windows.get(int(at_s / WINDOW_S), (0, 0))
        windows[int(at_s / WINDOW_S)] = (seen + whole, got + part)
        total += whole
    return min((got / seen for seen, got in windows.values() if seen and seen * 100 >= total), default=1.0)
