"""Predicted footprints: how long first prompts are, and how long contexts get.

A task's final context is expected to be what it said itself; else the mean of its finished siblings; else the mean of
those recent tasks of its environment that got longer than it is now; else, before any has finished, the prior.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

from tide_trainer.scheduling.settings import CtbSettings

_NUM_RECENT = 64


class _Mean:
    """A running mean from a prior of weight one; later it forgets: the newest sample weighs at least `alpha`."""

    __slots__ = ("count", "value")

    def __init__(self, prior: float) -> None:
        self.value = prior
        self.count = 1

    def add(self, sample: float, alpha: float) -> None:
        self.count += 1
        self.value += max(alpha, 1.0 / self.count) * (sample - self.value)


class _Recent:
    """The final contexts of an environment's latest tasks, in order of time and of length."""

    __slots__ = ("by_length", "by_time")

    def __init__(self) -> None:
        self.by_time: deque[int] = deque()
        self.by_length: list[int] = []

    def add(self, tokens: int) -> None:
        if len(self.by_time) == _NUM_RECENT:
            self.by_length.remove(self.by_time.popleft())
        self.by_time.append(tokens)
        insort(self.by_length, tokens)

    def mean_above(self, tokens: int) -> float | None:
        longer = self.by_length[bisect_right(self.by_length, tokens) :]
        return sum(longer) / len(longer) if longer else None


class GrowthPredictor:
    """Learns from finished tasks; before any, the settings' prior answers."""

    def __init__(self, settings: CtbSettings) -> None:
        """Starts from the priors of the settings."""
        self._settings = settings
        self._prompt: dict[str, _Mean] = {}
        self._recent: dict[str, _Recent] = {}
        self._max_new: dict[str, int] = {}

    def observe_first_call(self, environment: str, prompt_tokens: int, max_new_tokens: int) -> None:
        """A task's first prompt has been measured."""
        mean = self._prompt.setdefault(environment, _Mean(self._settings.prior(environment).prompt_tokens))
        mean.add(prompt_tokens, self._settings.prediction_weight)
        self._max_new[environment] = max_new_tokens

    def observe_final(self, environment: str, context_tokens: int) -> None:
        """A task ended with a context of so many tokens."""
        self._recent.setdefault(environment, _Recent()).add(context_tokens)

    def first_call_tokens(self, environment: str, prompt_tokens: int | None) -> int:
        """Footprint of a task's first call: its prompt (or the environment's, if None) and its new tokens."""
        prompt = self._prompt.get(environment)
        if prompt_tokens is None:
            prompt_tokens = round(prompt.value) if prompt else self._settings.prior(environment).prompt_tokens
        return prompt_tokens + self._max_new.get(environment, 0)

    def known_final_tokens(self, environment: str, tokens: int) -> int | None:
        """How long a context of `tokens` gets, as others did; the longest of all stays. None before any ended."""
        recent = self._recent.get(environment)
        if recent is None:
            return None
        mean = recent.mean_above(tokens)
        return tokens if mean is None else round(mean)

    def remaining_tokens(self, environment: str, tokens: int, final_tokens: float | None = None) -> int:
        """By how much a context of `tokens` is expected to grow, times the configured share.

        Args:
            environment: its name.
            tokens: the context now, the tokens that its call may generate included.
            final_tokens: what is known of this task or its siblings; None: what is usual.
        """
        if final_tokens is None:
            final_tokens = self.known_final_tokens(environment, tokens)
        if final_tokens is None:
            final_tokens = self._settings.prior(environment).final_tokens or 2 * tokens
        return round(self._settings.growth_fraction * max(0.0, final_tokens - tokens))
