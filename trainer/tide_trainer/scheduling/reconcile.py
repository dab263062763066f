"""Two accounts of a rank's KV cache, compared: what the scheduler believes, and what the engine measures.

    belief (granted calls, usage) --+                              +--> Alarm raised, after `patience` looks in a row
                                    +--> Reconciler.look, each poll +
    measured (blocks by request) ---+                              +--> Alarm cleared, after as many good ones

| kind | the accounts part because |
| --- | --- |
| no_capacity | the engine does not say what its cache holds: nothing may be scheduled on a guess |
| engine_silent | the engine does not answer |
| unreported | the engine runs requests that no granted call stands for |
| missing | granted calls are not at the engine |
| above | requests, or all of them, hold more than was believed possible |
| evicted | contexts that were believed resident were not found in the prefix cache |

Pure: the caller polls, and says the time. Everything is keyed by rank (worker and index), never by worker alone.
Source: TideRL section 4.2 (footprints are measured, not guessed). Deviation: the paper takes the engine's own figures;
here they are held against the reports, so that a source that is wrong or silent is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import Field

from tide_trainer.settings_base import Settings
from tide_trainer.types import RankId

MAX_NAMED = 3
"""Requests that an alarm names."""


class WatchSettings(Settings):
    """[rollout.watch]: looks at the engines' live KV use, beside what the router measures of each turn."""

    interval_s: float = Field(
        default=1.0, ge=0, le=3600, description="seconds between looks at a rank; 0: never, and no alarm is raised"
    )
    deadline_s: float = Field(default=5.0, gt=0, le=3600, description="seconds after which a look has failed")
    patience: int = Field(
        default=3, ge=1, le=1000, description="looks in a row that must be bad before an alarm, and good to clear it"
    )
    tolerance: float = Field(
        default=0.1, ge=0, le=10, description="share by which a measured use may be above the believed one"
    )
    grace_s: float = Field(
        default=5.0, ge=0, description="seconds in which a granted call may be on its way to, or from, its engine"
    )
    evicted_fraction: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="share of the tokens believed to be cached that may be computed anew before it is an alarm",
    )


class AlarmKind(StrEnum):
    """How belief and measurement part; see the module."""

    NO_CAPACITY = "no_capacity"
    ENGINE_SILENT = "engine_silent"
    UNREPORTED = "unreported"
    MISSING = "missing"
    ABOVE = "above"
    EVICTED = "evicted"


_UNREADY = frozenset({AlarmKind.NO_CAPACITY, AlarmKind.ENGINE_SILENT})
_OF_REQUESTS = frozenset({AlarmKind.UNREPORTED, AlarmKind.MISSING, AlarmKind.ABOVE})
"""Kinds that need the gate open: around a weight sync the trainer itself samples, and calls are on their way."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One disagreement that lasts.

    Attributes:
        rank: where.
        kind: how.
        message: with the figures, and the requests and tasks, at the look that raised it.
        since_s: the time of that look.
    """

    rank: RankId
    kind: AlarmKind
    message: str
    since_s: float


@dataclass(frozen=True, slots=True)
class BelievedCall:
    """A call that was granted a rank and has not ended.

    Attributes:
        request: its id at the engine.
        task: whose call it is.
        need_tokens: the longest that it can get, prompt and completion.
        since_s: when it was granted.
    """

    request: str
    task: str
    need_tokens: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Belief:
    """What the scheduler believes of a rank at the time of a look.

    Attributes:
        kv_tokens: the cache's size, as the engine said at its start.
        block_tokens: tokens of a KV block.
        gate_open: no weight sync is under way.
        usage_tokens: live tokens of the rank's tasks; the larger one of before and after the look.
        calls: granted before the look, and not ended after it.
        passing: ids of other requests that may be there: granted during the look, or ended shortly before.
        expected_tokens: context tokens believed to be cached, of the turns since the last look.
        found_tokens: how many of these the engine had.
    """

    rank: RankId
    kv_tokens: int
    block_tokens: int
    gate_open: bool
    usage_tokens: int
    calls: tuple[BelievedCall, ...] = ()
    passing: frozenset[str] = frozenset()
    expected_tokens: int = 0
    found_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine says of itself.

    Attributes:
        used_tokens: tokens of the KV blocks that requests hold; negative where it cannot tell.
        requests: request id -> (computed tokens, KV blocks held); None where it cannot tell.
    """

    used_tokens: int
    requests: Mapping[str, tuple[int, int]] | None


@dataclass(slots=True)
class _Watched:
    """Looks in a row: bad ones by fault (kind and what it is about), good ones by raised kind."""

    bad: dict[tuple[AlarmKind, str], int] = field(default_factory=dict[tuple[AlarmKind, str], int])
    good: dict[AlarmKind, int] = field(default_factory=dict[AlarmKind, int])
    raised: dict[AlarmKind, Alarm] = field(default_factory=dict[AlarmKind, Alarm])


class Reconciler:
    """Compares, look by look, and keeps the alarms. O(requests) a look."""

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._ranks: dict[RankId, _Watched] = {}

    def look(
        self, belief: Belief, measured: Measured | None, now_s: float
    ) -> tuple[tuple[Alarm, ...], tuple[Alarm, ...]]:
        """Takes one look at a rank.

        Args:
            belief: the scheduler's account.
            measured: the engine's; None where it did not answer.
            now_s: the time of the look.

        Returns:
            The alarms that it raises, and those that it clears.
        """
        watched = self._ranks.setdefault(belief.rank, _Watched())
        judged = _judged(belief, measured)
        # What has been raised must be better by half of the tolerance before it clears.
        faults = {
            kind: _faults(kind, belief, measured, self._settings, eased=kind in watched.raised, now_s=now_s)
            for kind in judged
        }
        watched.bad = {
            key: count for key, count in watched.bad.items() if key[0] not in judged or key[1] in faults[key[0]]
        }
        raised: list[Alarm] = []
        cleared: list[Alarm] = []
        for kind, found in faults.items():
            for about in found:
                watched.bad[kind, about] = watched.bad.get((kind, about), 0) + 1
            if kind in watched.raised:
                watched.good[kind] = 0 if found else watched.good.get(kind, 0) + 1
                if watched.good[kind] >= self._settings.patience:
                    cleared.append(watched.raised.pop(kind))
                continue
            lasting = [about for about in found if watched.bad[kind, about] >= self._settings.patience]
            if lasting:
                told = "; ".join(found[about] for about in lasting[:MAX_NAMED])
                more = f"; and {len(lasting) - MAX_NAMED} more" if len(lasting) > MAX_NAMED else ""
                alarm = watched.raised[kind] = Alarm(belief.rank, kind, told + more, now_s)
                watched.good[kind] = 0
                raised.append(alarm)
        return tuple(raised), tuple(cleared)

    def forget(self, rank: RankId) -> tuple[Alarm, ...]:
        """The rank is gone; returns its alarms, which end with it."""
        watched = self._ranks.pop(rank, None)
        return () if watched is None else tuple(watched.raised.values())

    def alarms(self) -> tuple[Alarm, ...]:
        """All that last, the oldest first."""
        found = [alarm for watched in self._ranks.values() for alarm in watched.raised.values()]
        return tuple(sorted(found, key=lambda alarm: (alarm.since_s, alarm.rank, alarm.kind)))

    def has_capacity(self, rank: RankId) -> bool:
        """False while nothing reliable is known of what the rank's cache holds."""
        watched = self._ranks.get(rank)
        return watched is None or not _UNREADY & watched.raised.keys()


def _judged(belief: Belief, measured: Measured | None) -> frozenset[AlarmKind]:
    """The kinds that a look can say something about; the others stay as they are."""
    if measured is None:
        return frozenset({AlarmKind.ENGINE_SILENT})
    judged = {AlarmKind.ENGINE_SILENT, AlarmKind.NO_CAPACITY}
    if belief.gate_open and _readable(belief, measured):
        judged |= _OF_REQUESTS
    if belief.expected_tokens:
        judged.add(AlarmKind.EVICTED)
    return frozenset(judged)


def _readable(belief: Belief, measured: Measured) -> bool:
    return belief.kv_tokens > 0 and measured.used_tokens >= 0 and measured.requests is not None


def _faults(
    kind: AlarmKind,
    belief: Belief,
    measured: Measured | None,
    settings: WatchSettings,
    *,
    eased: bool,
    now_s: float,
) -> dict[str, str]:
    """What is wrong at this look: what it is about -> a sentence. Empty: nothing."""
    if kind is AlarmKind.ENGINE_SILENT:
        return {"": "the engine does not say what it holds"} if measured is None else {}
    if measured is None:
        return {}
    if kind is AlarmKind.NO_CAPACITY:
        return {} if _readable(belief, measured) else {"": _unreadable(belief, measured)}
    requests = measured.requests or {}
    half = 0.5 if eased else 1.0
    if kind is AlarmKind.UNREPORTED:
        known = {call.request for call in belief.calls} | belief.passing
        strange = sorted(request for request in requests if request not in known)
        # One fault for all of them: each may be short, and still there is always one.
        told = f"requests that no granted call stands for: {', '.join(strange[:MAX_NAMED])} ({len(strange)})"
        return {"": told} if strange else {}
    if kind is AlarmKind.MISSING:
        return {
            call.request: f"{call.request} of {call.task}, granted {now_s - call.since_s:.0f} s ago, is not there"
            for call in belief.calls
            if call.request not in requests and now_s - call.since_s > settings.grace_s
        }
    if kind is AlarmKind.ABOVE:
        return _above(belief, measured, 1.0 + settings.tolerance * half)
    lost_tokens = belief.expected_tokens - belief.found_tokens
    if lost_tokens <= settings.evicted_fraction * half * belief.expected_tokens:
        return {}
    return {"": f"{lost_tokens} of {belief.expected_tokens} tokens believed to be cached were computed anew"}


def _unreadable(belief: Belief, measured: Measured) -> str:
    if belief.kv_tokens <= 0:
        return f"the engine says that its cache holds {belief.kv_tokens} tokens"
    return "the engine cannot read its blocks" if measured.used_tokens < 0 else "the engine cannot read its requests"


def _above(belief: Belief, measured: Measured, factor: float) -> dict[str, str]:
    block, found = belief.block_tokens, dict[str, str]()
    for call in belief.calls:
        _, num_blocks = (measured.requests or {}).get(call.request, (0, 0))
        # A block is begun for the token that comes next.
        if num_blocks * block > call.need_tokens * factor + block:
            found[call.request] = (
                f"{call.request} of {call.task} holds {num_blocks * block} tokens, {call.need_tokens} were believed"
            )
    num_slack = len(belief.calls) + len(belief.passing)
    if measured.used_tokens > belief.usage_tokens * factor + num_slack * block:
        found[""] = f"all requests hold {measured.used_tokens} tokens, {belief.usage_tokens} were believed"
    return found
