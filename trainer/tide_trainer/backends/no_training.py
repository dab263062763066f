"""The training backend of who does not train: nothing is started, and whatever needs weights is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from tide_trainer import types
from tide_trainer.errors import BackendFailed


class NoTraining:
    """`protocols.TrainingBackend` for an evaluation: the rollout engines keep the weights of their model folder."""

    async def start(self, checkpoint: str | None = None) -> int:
        """Starts nothing."""
        return 0

    async def train(self, batch: types.TrainBatch) -> types.TrainReport:
        """Refused with BackendFailed."""
        _refuse()

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[types.ImageSpan]] = ()
    ) -> list[list[float]]:
        """Refused with BackendFailed."""
        _refuse()

    async def publish(self, version: int) -> types.WeightUpdate:
        """Refused with BackendFailed."""
        _refuse()

    async def save(self, directory: str, extra: Mapping[str, str]) -> None:
        """Refused with BackendFailed."""
        _refuse()

    async def stop(self) -> None:
        """Nothing is there to stop."""


def _refuse() -> NoReturn:
    raise BackendFailed("there are no Actor ranks: this only evaluates")
