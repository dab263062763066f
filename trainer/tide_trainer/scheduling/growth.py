"""Predicted footprints per environment: how long first prompts are, and how long contexts get."""

from __future__ import annotations

from tide_trainer.scheduling.settings import CtbSettings


class _Mean:
    """A running mean from a prior of weight one; later it forgets: the newest sample weighs at least `alpha`."""

    __slots__ = ("count", "value")

    def __init__(self, prior: float) -> None:
        self.value = prior
        self.count = 1

    def add(self, sample: float, alpha: float) -> None:
        self.count += 1
        self.value += max(alpha, 1.0 / self.count) * (sample - self.value)


class GrowthPredictor:
    """Learns from finished tasks; before any, the settings' prior answers."""

    def __init__(self, settings: CtbSettings) -> None:
        """Starts from the priors of the settings."""
        self._settings = settings
        self._prompt: dict[str, _Mean] = {}
        self._final: dict[str, _Mean] = {}
        self._max_new: dict[str, int] = {}

    def observe_first_call(self, environment: str, prompt_tokens: int, max_new_tokens: int) -> None:
        """A task's first prompt has been measured."""
        mean = self._prompt.setdefault(environment, _Mean(self._settings.prior(environment).prompt_tokens))
        mean.add(prompt_tokens, self._settings.prediction_weight)
        self._max_new[environment] = max_new_tokens

    def observe_final(self, environment: str, context_tokens: int) -> None:
        """A task ended with a context of so many tokens."""
        mean = self._final.setdefault(environment, _Mean(self._settings.prior(environment).final_tokens))
        mean.add(context_tokens, self._settings.prediction_weight)

    def first_call_tokens(self, environment: str, prompt_tokens: int | None) -> int:
        """Footprint of a task's first call: its prompt (or the environment's, if None) and its new tokens."""
        prompt = self._prompt.get(environment)
        if prompt_tokens is None:
            prompt_tokens = round(prompt.value) if prompt else self._settings.prior(environment).prompt_tokens
        return prompt_tokens + self._max_new.get(environment, 0)

    def known_final_tokens(self, environment: str) -> int | None:
        """How long the contexts of an environment's tasks got, None before one has ended."""
        final = self._final.get(environment)
        return None if final is None else round(final.value)

    def projected_tokens(self, environment: str, tokens: int, final_tokens: int | None = None) -> int:
        """A footprint of `tokens` with the configured share of its growth to `final_tokens`, or to the mean if None."""
        final = self._final.get(environment)
        predicted = final.value if final else self._settings.prior(environment).final_tokens
        if final_tokens is not None:
            predicted = final_tokens
        return tokens + round(self._settings.growth_fraction * max(0.0, predicted - tokens))
