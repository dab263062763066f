"""The watch over the engines: what they measure reaches the scheduler, and what does not fit is told once."""

from __future__ import annotations

import asyncio

import pytest
from shell_parts import RANK, Clock, begin, call, finish, settle, turn

from tide_trainer.engine_client import EngineSnapshot
from tide_trainer.errors import EngineFailed
from tide_trainer.loop.beliefs import Beliefs
from tide_trainer.loop.engine_watch import EngineWatch
from tide_trainer.scheduling.reconcile import AlarmKind, WatchSettings
from tide_trainer.types import EngineInfo, EngineStats, RankId

STATS = dict.fromkeys(EngineStats.__dataclass_fields__, 0)


class Source:
    """An engine's live numbers as the test sets them; None: it does not answer."""

    def __init__(self, **requests) -> None:
        self.requests, self.used_tokens, self.closed = requests, 0, False
        self.meanwhile = lambda: None

    async def snapshot(self, *, timeout_s=None):
        self.meanwhile()
        await asyncio.sleep(0)
        if self.requests is None:
            raise EngineFailed("gone")
        return EngineSnapshot(EngineStats(**{**STATS, "kv_used_tokens": self.used_tokens}), self.requests)

    async def aclose(self):
        self.closed = True


@pytest.fixture
def watched(world):
    """A shell with one rank, and a watch over it that sees what the source says."""

    def build(patience=2, **changes):
        made = world(**changes)
        records = []
        settings = WatchSettings(interval_s=0.001, patience=patience, grace_s=5.0)
        watch = EngineWatch(settings, made.shell, lambda event, **fields: records.append((event, fields)), made.clock)
        made.source = Source()
        watch.add_rank(EngineInfo(RANK, "http://engine", 200, 1, 100), None, made.source)
        made.watch, made.records = watch, records
        return made

    return build


async def test_a_call_at_its_engine_is_believed_and_found(watched, prompt):
    world = watched()
    session = await begin(world, prompt)
    call(world, session, "7")
    await settle()
    world.clock.s += 60
    world.source.requests, world.source.used_tokens = {"c7": (10, 12)}, 12
    for _ in range(5):
        await world.watch.look()
    assert world.watch.alarms == ()
    assert world.watch.used_tokens(RANK) == 12
    turn(world, session, "7")
    world.source.requests, world.source.used_tokens = {}, 0
    await world.watch.look()
    assert world.watch.alarms == ()
    await finish(world, session)
    assert world.records == []


async def test_a_call_that_ends_or_begins_during_a_look_is_no_stranger(watched, prompt):
    world = watched()
    session = await begin(world, prompt)
    call(world, session, "1")
    await settle()
    world.source.requests = {"c1": (1, 1), "c2": (1, 1)}

    def meanwhile():
        turn(world, session, "1")
        call(world, session, "2")
        world.shell._plan()
        turn(world, session, "2")

    world.source.meanwhile = meanwhile
    await world.watch.look()
    world.source.meanwhile = lambda: None
    for _ in range(4):
        await world.watch.look()
    assert world.watch.alarms == ()
    world.clock.s += 6
    for _ in range(2):
        await world.watch.look()
    assert [alarm.kind for alarm in world.watch.alarms] == [AlarmKind.UNREPORTED]
    await finish(world, session)


async def test_a_call_that_was_answered_during_a_look_is_not_missing(watched, prompt):
    world = watched(patience=1)
    session = await begin(world, prompt)
    call(world, session, "1")
    await settle()
    world.clock.s += 60
    world.source.meanwhile = lambda: turn(world, session, "1")
    await world.watch.look()
    assert world.watch.alarms == ()
    await finish(world, session)


async def test_t7_without_capacity_data_it_is_not_ready_and_says_so_once(watched, caplog):
    world = watched()
    assert world.watch.ready()
    world.source.requests = None
    for _ in range(5):
        await world.watch.look()
    assert not world.watch.ready()
    assert world.watch.used_tokens(RANK) is None
    assert [(event, fields.get("kind"), fields.get("ready")) for event, fields in world.records] == [
        ("alarm", AlarmKind.ENGINE_SILENT, None),
        ("readiness", None, False),
    ]
    assert sum("engine_silent" in line.message for line in caplog.records) == 1
    shown = world.watch.shown()
    assert (shown["ready"], shown["alarms"][0]["rank"]) == (False, str(RANK))
    world.source.requests = {}
    for _ in range(2):
        await world.watch.look()
    assert world.watch.ready()
    assert [event for event, _ in world.records] == ["alarm", "readiness", "alarm", "readiness"]
    assert world.records[2][1]["state"] == "cleared"


async def test_t7_an_engine_that_cannot_read_its_blocks_is_not_taken_for_empty(watched):
    world = watched()
    told = []
    world.shell.on_engine_usage = lambda *about: told.append(about)
    world.source.used_tokens = -32
    for _ in range(2):
        await world.watch.look()
    assert [alarm.kind for alarm in world.watch.alarms] == [AlarmKind.NO_CAPACITY]
    assert not world.watch.ready()
    assert told == []


async def test_t7_no_rank_at_all_is_not_ready(watched):
    world = watched()
    world.watch.drop_rank(RANK)
    world.shell.quarantine(RANK, "killed")
    await world.watch.look()
    assert not world.watch.ready()
    assert world.records[-1] == ("readiness", {"ready": False})
    await settle()
    assert world.source.closed


async def test_t8_one_silent_rank_holds_up_no_other(watched):
    world = watched()
    second = RankId(RANK.worker, RANK.index + 1)
    world.shell.add_rank(EngineInfo(second, "http://engine", 200, 1, 100))
    other = Source()
    world.watch.add_rank(EngineInfo(second, "http://engine", 200, 1, 100), None, other)
    world.source.requests = None
    for _ in range(3):
        await world.watch.look()
    assert [alarm.rank for alarm in world.watch.alarms] == [RANK]
    assert (world.watch.used_tokens(RANK), world.watch.used_tokens(second)) == (None, 0)
    assert world.watch.ready()
    world.watch.drop_rank(RANK)
    assert world.watch.alarms == ()
    assert world.records[-1][1]["state"] == "cleared"


async def test_r5_an_engine_that_never_answers_ends_the_look_at_its_deadline(watched):
    world = watched()
    world.watch._settings = world.watch._settings.model_copy(update={"deadline_s": 0.01})

    async def hangs(*, timeout_s=None):
        await asyncio.Event().wait()

    world.source.snapshot = hangs
    async with asyncio.timeout(20):
        for _ in range(2):
            await world.watch.look()
    assert [alarm.kind for alarm in world.watch.alarms] == [AlarmKind.ENGINE_SILENT]


async def test_r4_a_rank_that_leaves_during_a_look_is_left_out(watched):
    world = watched()

    def leaves():
        world.watch.drop_rank(RANK)
        world.shell.quarantine(RANK, "killed")

    world.source.meanwhile = leaves
    await world.watch.look()
    assert not world.shell.failed.done()
    assert world.watch.alarms == ()


async def test_it_looks_again_and_again_and_closes_its_clients(watched):
    world = watched()
    seen = asyncio.Semaphore(0)
    world.source.meanwhile = seen.release
    running = asyncio.create_task(world.watch.run())
    async with asyncio.timeout(20):
        for _ in range(3):
            await seen.acquire()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert world.source.closed


def answered(beliefs, call, context_tokens, cached_tokens, version=1, rank=RANK, prompt_tokens=None):
    footprint = {"context_tokens": context_tokens, "cached_tokens": cached_tokens}
    footprint["prompt_tokens"] = context_tokens - 2 if prompt_tokens is None else prompt_tokens
    beliefs.granted(call, "t", rank, context_tokens)
    beliefs.answered("t", call, {"footprint": footprint, "version": version})
    beliefs.ended(call)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (40, 16)),
        ({"version": 2}, (0, 0)),
        ({"rank": RankId("w", 9)}, (0, 0)),
        ({"prompt_tokens": 30}, (24, 16)),
    ],
)
def test_a_context_is_expected_in_the_cache_where_its_last_turn_left_it(change, expected):
    beliefs = Beliefs(Clock())
    for rank in (RANK, RankId("w", 9)):
        beliefs.add_rank(rank, 8)
    answered(beliefs, "1", 42, 0)
    answered(beliefs, "2", 60, 16, **change)
    found = beliefs.take_cached(change.get("rank", RANK))
    assert (found.expected_tokens, found.found_tokens) == expected
    assert beliefs.take_cached(RANK).expected_tokens == 0


def test_a_paused_tasks_context_is_expected_nowhere():
    beliefs = Beliefs(Clock())
    beliefs.add_rank(RANK, 8)
    answered(beliefs, "1", 42, 0)
    beliefs.released("t")
    answered(beliefs, "2", 60, 0)
    assert beliefs.take_cached(RANK).expected_tokens == 0


def test_calls_that_ended_are_remembered_for_as_long_as_is_asked():
    clock = Clock()
    beliefs = Beliefs(clock)
    answered(beliefs, "1", 42, 0)
    clock.s += 5
    beliefs.ended("never granted")
    answered(beliefs, "2", 60, 0)
    assert beliefs.passing(RANK, 0.0) == {"c1", "c2"}
    assert beliefs.passing(RankId("w", 9), 0.0) == frozenset()
    assert beliefs.passing(RANK, 1.0) == {"c2"}


@pytest.mark.parametrize("silent", ["dead", "unknown"])
async def test_an_overload_is_forgotten_when_the_engine_falls_silent(watched, silent):
    world = watched()
    state = world.shell._scheduler._state.ranks[RANK]
    world.clock.s += 1
    world.source.used_tokens = 200
    await world.watch.look()
    assert state.overloaded
    if silent == "dead":
        world.source.requests = None
    else:
        world.source.used_tokens = -1
    await world.watch.look()
    assert state.overloaded, "one bad look says nothing"
    await world.watch.look()
    assert not state.overloaded
