"""Looks at every rollout rank's live KV use, and holds it against what the scheduler believes.

    every interval_s, rank by rank:  beliefs -> GET /tide/stats?requests=1 -> beliefs again
                                                     |                          |
                     scheduler (measured use) <------+--> Reconciler <----------+
                                                              |
                     log, metrics.jsonl, live view <-- alarms raised and cleared; not ready without capacity data

Waits for: the engines' answers, each at most `deadline_s`. A rank that does not answer holds up no other rank, is not
ended by this (that is the probe's to decide), and its last measured use is forgotten.
Source: TideRL section 4.2.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tide_trainer.engine_client import EngineClient, EngineSnapshot
from tide_trainer.errors import TrainerError
from tide_trainer.loop.beliefs import Beliefs, both
from tide_trainer.scheduling.plan import SchedulerView
from tide_trainer.scheduling.reconcile import Alarm, Belief, Measured, Reconciler, WatchSettings
from tide_trainer.types import EngineInfo, RankId

_LOG = logging.getLogger(__name__)


class Watched(Protocol):
    """What the watch needs of the scheduler's shell."""

    beliefs: Beliefs

    def view(self) -> SchedulerView:
        """The scheduler's counters."""
        ...

    def on_engine_usage(self, rank: RankId, used_tokens: int, now_s: float) -> None:
        """The engine's own measurement of the KV that requests held at `now_s`; -1: it is not known any more."""
        ...


class Source(Protocol):
    """What the watch needs of a rank's client; `EngineClient` does it."""

    async def snapshot(self, *, timeout_s: float | None = None) -> EngineSnapshot:
        """The live numbers and the requests, of one moment."""
        ...

    async def aclose(self) -> None:
        """Closes all connections."""
        ...


@dataclass(slots=True)
class _Rank:
    info: EngineInfo
    source: Source
    used_tokens: int | None = None
    was_measured: bool = False


class EngineWatch:
    """Watches the ranks that it was given.

    Args:
        settings: how often, how patient.
        shell: what is believed, and who learns what is measured.
        record: writes to metrics.jsonl.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        settings: WatchSettings,
        shell: Watched,
        record: Callable[..., Any],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._shell = shell
        self._record = record
        self._now = now
        self._reconciler = Reconciler(settings)
        self._ranks: dict[RankId, _Rank] = {}
        self._unready = False
        self._peaks: dict[str, float] = {}
        self._closing: set[asyncio.Future[None]] = set()

    def add_rank(self, info: EngineInfo, token: str | None, source: Source | None = None) -> None:
        """Watches a rank from now on; `source` stands in for its client."""
        client = source or EngineClient(info.url, token=token, max_in_flight=1, timeout_s=self._settings.deadline_s)
        self._ranks[info.rank] = _Rank(info, client)

    def drop_rank(self, rank: RankId) -> None:
        """The rank is gone, its alarms with it; idempotent."""
        found = self._ranks.pop(rank, None)
        if found is not None:
            self._tell((), self._reconciler.forget(rank))
            closing = asyncio.ensure_future(found.source.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def run(self) -> None:
        """Looks until it is cancelled; with an interval of 0 it never looks."""
        try:
            while self._settings.interval_s:
                await self.look()
                await asyncio.sleep(self._settings.interval_s)
        finally:
            await asyncio.gather(*(rank.source.aclose() for rank in self._ranks.values()), *self._closing)

    async def look(self) -> None:
        """One look at every rank, side by side."""
        await asyncio.gather(*(self._look(rank) for rank in tuple(self._ranks.values())))
        self._readiness()

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """All that last, the oldest first."""
        return self._reconciler.alarms()

    def used_tokens(self, rank: RankId) -> int | None:
        """KV tokens that requests held at the last look; None where the engine did not say."""
        found = self._ranks.get(rank)
        return None if found is None else found.used_tokens

    def shown(self) -> dict[str, Any]:
        """What the live view shows of it."""
        return {
            "ready": self.ready(),
            "alarms": [{"rank": str(a.rank), "kind": a.kind, "message": a.message} for a in self.alarms],
        }

    def take_peaks(self) -> dict[str, float]:
        """The largest share of its budget that a rank used, as believed and as measured, since the last call."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def ready(self) -> bool:
        """True where a rank is up whose cache is known: without one nothing may ever be granted on a guess."""
        view = self._shell.view()
        return view.ready and any(self._reconciler.has_capacity(rank.rank) for rank in view.ranks)

    async def _look(self, rank: _Rank) -> None:
        rank_id, beliefs, view = rank.info.rank, self._shell.beliefs, self._shell.view()
        before, began_s = beliefs.calls(rank_id), self._now()
        open_before, usage_before = view.gate_open, _usage(view, rank_id)
        snapshot = await self._snapshot(rank)
        if self._ranks.get(rank_id) is not rank:
            return
        now_s, view, after = self._now(), self._shell.view(), beliefs.calls(rank_id)
        cached, staying = beliefs.take_cached(rank_id), both(before, after)
        stay = {call.request for call in staying}
        passing = beliefs.passing(rank_id, began_s - self._settings.grace_s)
        belief = Belief(
            rank=rank_id,
            kv_tokens=rank.info.kv_tokens,
            block_tokens=rank.info.block_tokens,
            gate_open=open_before and view.gate_open,
            usage_tokens=max(usage_before, _usage(view, rank_id)),
            calls=staying,
            passing=passing | {call.request for call in after if call.request not in stay},
            expected_tokens=cached.expected_tokens,
            found_tokens=cached.found_tokens,
        )
        measured = None if snapshot is None else Measured(snapshot.stats.kv_used_tokens, snapshot.requests)
        rank.used_tokens = None if measured is None or measured.used_tokens < 0 else measured.used_tokens
        budget_tokens = next((one.budget_tokens for one in view.ranks if one.rank == rank_id), 0)
        self._peak("kv_usage", belief.usage_tokens, budget_tokens)
        if rank.used_tokens is not None:
            self._peak("kv_measured", rank.used_tokens, budget_tokens)
            rank.was_measured = True
            # It is as old as the question, for all that is known.
            self._shell.on_engine_usage(rank_id, rank.used_tokens, began_s)
        self._tell(*self._reconciler.look(belief, measured, now_s))
        if rank.used_tokens is None and rank.was_measured and not self._reconciler.has_capacity(rank_id):
            # Else an overload that was measured before would last for ever, with one call at a time.
            self._shell.on_engine_usage(rank_id, -1, began_s)

    async def _snapshot(self, rank: _Rank) -> EngineSnapshot | None:
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await rank.source.snapshot(timeout_s=self._settings.deadline_s)
        except (TrainerError, TimeoutError) as error:
            _LOG.debug("rollout rank %s did not say what it holds: %r", rank.info.rank, error)
            return None

    def _peak(self, name: str, tokens: int, budget_tokens: int) -> None:
        if budget_tokens:
            self._peaks[name] = max(self._peaks.get(name, 0.0), tokens / budget_tokens)

    def _tell(self, raised: tuple[Alarm, ...], cleared: tuple[Alarm, ...]) -> None:
        for alarm in raised:
            _LOG.error("alarm %s at rollout rank %s: %s", alarm.kind, alarm.rank, alarm.message)
            self._record("alarm", state="raised", rank=str(alarm.rank), kind=alarm.kind, message=alarm.message)
        for alarm in cleared:
            lasted_s = self._now() - alarm.since_s
            _LOG.warning("alarm %s at rollout rank %s is over after %.0f s", alarm.kind, alarm.rank, lasted_s)
            self._record("alarm", state="cleared", rank=str(alarm.rank), kind=alarm.kind, lasted_s=lasted_s)

    def _readiness(self) -> None:
        unready = not self.ready()
        if unready and not self._unready:
            _LOG.error("not ready: no rollout rank says what its KV cache holds")
        if unready != self._unready:
            self._record("readiness", ready=not unready)
        self._unready = unready


def _usage(view: SchedulerView, rank: RankId) -> int:
    return next((one.usage_tokens for one in view.ranks if one.rank == rank), 0)
