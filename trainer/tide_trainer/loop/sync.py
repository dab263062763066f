"""The weight sync: the rollout ranks drop their caches and take a new version, with no call in flight.

    publish -> close the gate -> drain -> update every rank (in place, proven) -> parity -> open the gate
               (calls that arrive now are paused at the gateway; they resume when the gate opens)

A rank that fails or is late is quarantined and left out; the run fails only below `min_ranks`.
Source: TideRL section 5.2 (caches are flushed at the post-update boundary), section 7 (faults).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tide_trainer.errors import EngineFailed, EngineRefused, RunFailed, TrainerError, WeightsDiffer
from tide_trainer.loop.parity import ParityImage, parity, parity_prompts
from tide_trainer.protocols import RolloutEngine, TrainingBackend
from tide_trainer.settings import RolloutSettings
from tide_trainer.types import RankId, WeightUpdate


class Gate(Protocol):
    """What the sync needs of the scheduler's shell."""

    def close_gate(self) -> None:
        """Grants nothing from now on."""
        ...

    async def drained(self) -> None:
        """Returns when no granted call is in flight."""
        ...

    def busy_ranks(self) -> frozenset[RankId]:
        """The ranks that have a call in flight."""
        ...

    def open_gate(self, version: int) -> None:
        """Grants again, on ranks that serve `version`."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync: its version, its seconds from closing to opening the gate, and the largest log-prob difference."""

    version: int
    wall_s: float
    parity_max_abs: float


class WeightSync:
    """Brings every living rollout rank to the trainer's weights.

    Attributes:
        parity_max_abs: the largest log-prob difference so far; None before the first sync.

    Args:
        backend: publishes and scores.
        engines: living rollout ranks; `quarantine` removes one from it.
        gate: the scheduler's shell.
        quarantine: takes a rank out for good, with the reason.
        settings: deadlines, minimum of ranks, parity tolerance.
        vocab_size: of the model, for the parity sample.
        seed: of the parity sample.
        image: of the parity sample; None for a model without images.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        engines: Mapping[RankId, RolloutEngine],
        gate: Gate,
        quarantine: Callable[[RankId, str], None],
        settings: RolloutSettings,
        vocab_size: int,
        seed: int,
        image: ParityImage | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._engines = engines
        self._gate = gate
        self._quarantine = quarantine
        self._settings = settings
        self._prompts = parity_prompts(vocab_size, settings.max_context_tokens, seed, image)
        self._now = now
        self.parity_max_abs: float | None = None

    async def to_version(self, version: int) -> SyncReport:
        """Publishes the trainer's weights as `version` and brings every rank to it.

        Raises:
            RunFailed: fewer than `min_ranks` ranks took the version, or the parity is broken.
        """
        update = await self._backend.publish(version)
        started_s = self._now()
        self._gate.close_gate()
        await self._drain()
        await self._update(update)
        difference = await self._parity(version)
        self._gate.open_gate(version)
        return SyncReport(version, self._now() - started_s, difference)

    async def _drain(self) -> None:
        """Waits for the calls in flight; ranks that do not finish theirs are quarantined, and the calls held again."""
        limit_s = self._settings.sync_timeout_s
        late = f"calls in flight did not finish in {limit_s:g} s before a sync"
        for last in (False, True):
            try:
                async with asyncio.timeout(limit_s):
                    await self._gate.drained()
                return
            except TimeoutError as error:
                ranks = self._gate.busy_ranks()
                if last or not ranks:
                    raise RunFailed(late) from error
            for rank in ranks:
                self._quarantine(rank, late)
            self._check_minimum(late)

    def _check_minimum(self, when: str) -> None:
        if len(self._engines) < self._settings.min_ranks:
            raise RunFailed(
                f"{when}: {len(self._engines)} rollout ranks are left, "
                f"below rollout.min_ranks = {self._settings.min_ranks}; see the engines' logs"
            )

    async def _update(self, update: WeightUpdate) -> None:
        async def one(rank: RankId, engine: RolloutEngine) -> None:
            try:
                async with asyncio.timeout(self._settings.sync_timeout_s):
                    receipt = await engine.update_weights(update)
            except (TrainerError, TimeoutError) as error:
                self._quarantine(rank, f"weight update to version {update.version} failed: {error!r}")
                return
            if receipt.version != update.version:
                self._quarantine(rank, f"reports version {receipt.version} after an update to {update.version}")

        await asyncio.gather(*(one(rank, engine) for rank, engine in list(self._engines.items())))
        self._check_minimum(f"after the update to version {update.version}")

    async def _parity(self, version: int) -> float:
        largest = 0.0
        for rank, engine in list(self._engines.items()):
            try:
                found = await parity(engine, self._backend, self._prompts, self._settings.max_context_tokens)
            except (EngineFailed, EngineRefused, WeightsDiffer) as error:
                self._quarantine(rank, f"does not sample at version {version}: {error}")
                continue
            largest = max(largest, found)
        self._check_minimum(f"after the update to version {version}")
        self.parity_max_abs = max(self.parity_max_abs or 0.0, largest)
        if not largest <= self._settings.parity_tolerance:
            raise RunFailed(
                f"engine and trainer log-probs differ by {largest:.3g}, above rollout.parity_tolerance = "
                f"{self._settings.parity_tolerance:g}: the rollout would sample from other weights than are trained"
            )
        return largest
