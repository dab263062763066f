"""The weight sync: the rollout ranks drop their caches and take a new version, with no call in flight.

    publish -> close the gate -> drain -> update every rank (in place, proven) -> parity -> open the gate
               (calls that arrive now are paused at the gateway; they resume when the gate opens)

A rank that serves an evaluation of its version may be left out: its gate stays open, and it takes the newest version
by `join` when the evaluation is over. Syncs and joins go one after the other.
A rank that fails or is late is quarantined and left out; the run fails only below `min_ranks`.
Source: TideRL section 5.2 (caches are flushed at the post-update boundary), section 7 (faults).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from tide_trainer.errors import EngineFailed, EngineRefused, RunFailed, TrainerError, WeightsDiffer
from tide_trainer.loop.parity import GreedyReference, ParityImage, greedy_reference, parity, parity_prompts
from tide_trainer.protocols import RolloutEngine, TrainingBackend
from tide_trainer.settings import RolloutSettings
from tide_trainer.types import RankId, WeightUpdate

_NO_RANKS: frozenset[RankId] = frozenset()
Spare = Callable[[], Awaitable[Set[RankId]]]


class Gate(Protocol):
    """What the sync needs of the scheduler's shell; each call is about the given ranks alone."""

    def close_gate(self, ranks: Set[RankId]) -> None:
        """Grants nothing there from now on. Raises RunFailed where it would strand an evaluation."""
        ...

    async def drained(self, ranks: Set[RankId]) -> None:
        """Returns when no granted call is in flight there."""
        ...

    def busy_ranks(self) -> frozenset[RankId]:
        """All ranks that have a call in flight."""
        ...

    def open_gate(self, version: int, ranks: Set[RankId]) -> None:
        """Grants again there; these ranks serve `version`."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync: its version, its seconds from closing to opening the gate, and the largest log-prob difference.

    `kept` are the ranks that were left at their version.
    """

    version: int
    wall_s: float
    parity_max_abs: float
    kept: frozenset[RankId] = _NO_RANKS


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
        self._one_at_a_time = asyncio.Lock()
        self._newest: WeightUpdate | None = None
        self._behind: set[RankId] = set()
        self._reference: GreedyReference | None = None
        self.parity_max_abs: float | None = None

    async def to_version(self, version: int, spare: Spare | None = None) -> SyncReport:
        """Publishes the trainer's weights as `version` and brings every rank to it but those that are spared.

        Cancelling leaves the gate closed; the next sync opens it.

        Args:
            version: above all earlier ones.
            spare: called once when the weights are there: the ranks that go on with their version, and serve only what
                is anchored to it, until they `join` or a later sync takes them along. It must not wait for a join.

        Raises:
            RunFailed: fewer than `min_ranks` ranks are left, or the parity is broken.
        """
        async with self._one_at_a_time:
            update = await self._backend.publish(version)
            keep = await spare() if spare is not None else _NO_RANKS
            started_s = self._now()
            self._newest, self._reference = update, None
            ranks = frozenset(self._engines) - keep
            self._behind = set(self._engines) - ranks
            self._gate.close_gate(ranks)
            await self._drain(ranks)
            await self._update(update, ranks)
            difference = await self._parity(version, ranks)
            self._gate.open_gate(version, ranks & self._engines.keys())
            return SyncReport(version, self._now() - started_s, difference, frozenset(self._behind))

    async def join(self, rank: RankId) -> None:
        """Brings a rank that was kept at its version to the newest one; it fails as in `to_version`.

        Nothing is done where the rank is gone or has the newest version. Safe to cancel, and to repeat.

        Raises:
            RunFailed: as `to_version`.
        """
        async with self._one_at_a_time:
            update, ranks = self._newest, frozenset({rank})
            if update is None or rank not in self._behind or rank not in self._engines:
                return
            self._gate.close_gate(ranks)
            await self._drain(ranks)
            await self._update(update, ranks)
            await self._join_parity(update.version, ranks)
            self._behind.discard(rank)
            self._gate.open_gate(update.version, ranks & self._engines.keys())

    async def _drain(self, ranks: Set[RankId]) -> None:
        """Waits for the calls in flight; ranks that do not finish theirs are quarantined, and the calls held again."""
        limit_s = self._settings.sync_timeout_s
        late = f"calls in flight did not finish in {limit_s:g} s before a sync"
        for last in (False, True):
            try:
                async with asyncio.timeout(limit_s):
                    await self._gate.drained(ranks)
                return
            except TimeoutError as error:
                busy = self._gate.busy_ranks() & ranks
                if last or not busy:
                    raise RunFailed(late) from error
            for rank in busy:
                self._quarantine(rank, late)
            self._check_minimum(late)

    def _check_minimum(self, when: str) -> None:
        if len(self._engines) < self._settings.min_ranks:
            raise RunFailed(
                f"{when}: {len(self._engines)} rollout ranks are left, "
                f"below rollout.min_ranks = {self._settings.min_ranks}; see the engines' logs"
            )

    async def _update(self, update: WeightUpdate, ranks: Set[RankId]) -> None:
        async def one(rank: RankId, engine: RolloutEngine) -> None:
            try:
                async with asyncio.timeout(self._settings.sync_timeout_s):
                    receipt = await engine.update_weights(update)
                    num_blocks = (await engine.stats()).num_cached_blocks
            except (TrainerError, TimeoutError) as error:
                self._quarantine(rank, f"weight update to version {update.version} failed: {error!r}")
                return
            if receipt.version != update.version:
                self._quarantine(rank, f"reports version {receipt.version} after an update to {update.version}")
            elif num_blocks != 0:
                told = f"{num_blocks} KV blocks" if num_blocks > 0 else "an unknown number of KV blocks"
                self._quarantine(rank, f"still caches {told} of an older version after the update to {update.version}")

        await asyncio.gather(*(one(rank, engine) for rank, engine in self._among(ranks)))
        self._check_minimum(f"after the update to version {update.version}")

    async def _parity(self, version: int, ranks: Set[RankId]) -> float:
        largest, max_tokens = 0.0, self._settings.max_context_tokens
        for rank, engine in self._among(ranks):
            try:
                found = await parity(engine, self._backend, self._prompts, max_tokens)
                # The trainer's weights have moved on when a kept rank joins: what it needs is scored now.
                if self._behind and self._reference is None and found <= self._settings.parity_tolerance:
                    self._reference = await greedy_reference(engine, self._backend, self._prompts, max_tokens)
            except (EngineFailed, EngineRefused, WeightsDiffer) as error:
                self._quarantine(rank, f"does not sample at version {version}: {error}")
                continue
            largest = max(largest, found)
        self._check_minimum(f"after the update to version {version}")
        self._judge(largest)
        return largest

    async def _join_parity(self, version: int, ranks: Set[RankId]) -> None:
        """Without a reference (the ranks that could say it died) the tensors' checksums are all the proof there is."""
        for rank, engine in self._among(ranks):
            if self._reference is None:
                continue
            try:
                self._judge(await self._reference.parity(engine))
            except (EngineFailed, EngineRefused, WeightsDiffer) as error:
                self._quarantine(rank, f"does not sample at version {version}: {error}")
        self._check_minimum(f"after a rank joined version {version}")

    def _judge(self, largest: float) -> None:
        self.parity_max_abs = max(self.parity_max_abs or 0.0, largest)
        if not largest <= self._settings.parity_tolerance:
            raise RunFailed(
                f"engine and trainer log-probs differ by {largest:.3g}, above rollout.parity_tolerance = "
                f"{self._settings.parity_tolerance:g}: the rollout would sample from other weights than are trained"
            )

    def _among(self, ranks: Set[RankId]) -> list[tuple[RankId, RolloutEngine]]:
        return [(rank, engine) for rank, engine in self._engines.items() if rank in ranks]
