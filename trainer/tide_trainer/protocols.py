"""The seams of the trainer: each protocol has a real implementation, a fake, and one contract suite over both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tide_trainer import types


class RolloutEngine(Protocol):
    """One rollout rank: an inference engine behind an HTTP server, whose weights are replaced in place."""

    @property
    def rank(self) -> types.RankId:
        """The rank that this engine is."""
        ...

    async def start(self) -> types.EngineInfo:
        """Boots the engine's process and waits until it serves. Raises EngineFailed with the log's tail."""
        ...

    async def update_weights(self, update: types.WeightUpdate) -> types.WeightReceipt:
        """Loads a version in place, drops every cached KV block, and proves it.

        The caller has no call in flight. A version that is not newer is refused; a checksum that differs raises
        WeightsDiffer and the engine serves nothing until a good update.
        """
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: types.Sampling, images: Sequence[types.ImageSpan] = ()
    ) -> types.Completion:
        """Samples one completion of a prompt of token ids [T], in which `images` have their placeholders in full."""
        ...

    async def stats(self) -> types.EngineStats:
        """The engine's live numbers."""
        ...

    async def stop(self) -> None:
        """Ends the engine's processes within 10 s; safe to call twice and before `start`."""
        ...


class TrainingBackend(Protocol):
    """The Actor ranks: holds the weights and the optimizer, takes batches, publishes versions."""

    async def start(self, checkpoint: str | None = None) -> int:
        """Boots the ranks from a model folder, or from a folder of `save`; returns its version, 0 if fresh."""
        ...

    async def train(self, batch: types.TrainBatch) -> types.TrainReport:
        """One optimizer update. An empty or all-masked batch changes nothing and reports zeros."""
        ...

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[types.ImageSpan]] = ()
    ) -> list[list[float]]:
        """Log-probs at the present weights: of each token given those before, per sequence ([T], first 0.0).

        `images` holds each sequence's, or nothing where no sequence has any.
        """
        ...

    async def publish(self, version: int) -> types.WeightUpdate:
        """Writes the present weights as `version` for the rollout ranks; only the last two versions' files are kept."""
        ...

    async def save(self, directory: str, extra: Mapping[str, str]) -> None:
        """Writes weights (Hugging Face format), optimizer and RNG atomically: a crash leaves the older one whole."""
        ...

    async def stop(self) -> None:
        """Ends the ranks' processes within 10 s; safe to call twice and before `start`."""
        ...
