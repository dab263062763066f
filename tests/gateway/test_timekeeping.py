"""The database's time: never backwards, deaf to the machine's clock, near the database's whatever happens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from fresh_databases import kind_params
from hypothesis import given
from hypothesis import strategies as st

from tide_gateway.database import StorageFailed, open_database
from tide_gateway.timekeeping import SLEW, DatabaseTime, ManualTime, WallTime

TRUE_S = 1_700_000_000.0
# Two neighbouring floats are 2.4e-7 apart there.
FLOAT_S = 2e-6


@dataclass
class World:
    """A machine, and a database whose clock may be off from the true time and whose answers take a while."""

    true_s: float = TRUE_S
    wall_off_s: float = 0.0
    clock_off_s: float = 0.0
    trips: list[tuple[float, float]] = field(default_factory=list)
    shared: bool = True
    away: bool = False
    fine_s: float = 0.0

    def wall(self) -> float:
        return self.true_s + self.wall_off_s

    def monotonic(self) -> float:
        return self.true_s - TRUE_S + 123.0 + self.fine_s

    async def read(self, fn):
        if self.away:
            raise StorageFailed("away")
        return fn(None)

    def clock_s(self, _connection) -> float:
        there, back = self.trips.pop(0) if self.trips else (0.0, 0.0)
        self.true_s += there
        clock_s = self.true_s + self.clock_off_s
        self.true_s += back
        return clock_s

    def time(self) -> DatabaseTime:
        return DatabaseTime(wall=self.wall, monotonic=self.monotonic)

    def sync(self, time: DatabaseTime) -> float:
        return asyncio.run(time.sync(self))


seconds = st.floats(0.0, 50.0)
offsets = st.floats(-5000.0, 5000.0)
trips = st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)), max_size=4)
events = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), seconds),
        st.tuples(st.just("wall"), offsets),
        st.tuples(st.just("clock"), offsets),
        st.tuples(st.just("sync"), trips),
        st.tuples(st.just("not before"), offsets),
        st.tuples(st.just("away"), st.booleans()),
    ),
    max_size=25,
)


@given(events, offsets)
def test_time_never_runs_backwards_and_jumps_no_further_than_it_is_corrected(happenings, wall_off_s):
    world = World(wall_off_s=wall_off_s)
    time = world.time()
    before_s = time.now_s()
    for name, value in happenings:
        true_s, allowed_s = world.true_s, 0.0
        if name == "pass":
            world.true_s += value
        elif name == "wall":
            world.wall_off_s = value
        elif name == "clock":
            world.clock_off_s = value
        elif name == "away":
            world.away = value
        elif name == "not before":
            time.not_before(world.true_s + value)
            assert time.now_s() >= world.true_s + value
            allowed_s = max(0.0, world.true_s + value - before_s)
        elif world.away:
            with pytest.raises(StorageFailed):
                world.sync(time)
        else:
            world.trips = list(value)
            allowed_s = max(0.0, world.sync(time))
        now_s = time.now_s()
        passed_s = world.true_s - true_s
        assert now_s >= before_s
        assert now_s <= before_s + passed_s + allowed_s + FLOAT_S
        before_s = now_s


@given(trips, offsets, offsets, seconds)
def test_the_first_reading_sets_time_to_half_of_the_quickest_round_trip(found, wall_off_s, clock_off_s, later_s):
    world = World(wall_off_s=wall_off_s, clock_off_s=clock_off_s, trips=list(found))
    time = world.time()
    quickest_s = min([there + back for there, back in found] + [0.0] * (len(found) < 4))
    world.sync(time)
    world.true_s += later_s
    assert abs(time.now_s() - world.true_s - clock_off_s) <= quickest_s / 2 + FLOAT_S


@given(trips, offsets)
def test_a_reading_that_proves_nothing_changes_nothing(found, clock_off_s):
    world = World(clock_off_s=clock_off_s)
    time = world.time()
    world.sync(time)
    world.trips = list(found)
    assert abs(world.sync(time)) <= FLOAT_S


@given(st.floats(0.0, 3000.0), st.floats(1.0, 100.0))
def test_a_clock_that_was_set_back_is_reached_again_while_time_goes_on(back_s, later_s):
    world = World()
    time = world.time()
    world.sync(time)
    world.clock_off_s = -back_s
    assert world.sync(time) == pytest.approx(-back_s, abs=FLOAT_S)
    before_s = time.now_s()
    world.true_s += later_s
    assert time.now_s() - before_s >= later_s * (1 - SLEW) - FLOAT_S
    world.sync(time)  # in the middle of it
    world.true_s += back_s / SLEW + 1.0
    assert time.now_s() == pytest.approx(world.true_s - back_s, abs=FLOAT_S)


def test_rounding_takes_no_time_back_either():
    world = World()
    time = world.time()
    world.sync(time)
    world.clock_off_s = -100.0
    world.sync(time)
    told = []
    for number in range(2000):
        world.fine_s = number * 1e-8
        told.append(time.now_s())
    assert told == sorted(told)


def test_a_machine_that_slept_catches_up_at_the_next_reading():
    world = World()
    time = world.time()
    world.sync(time)
    world.clock_off_s = 3600.0  # the monotonic clock stood still, the database's did not
    assert time.now_s() == pytest.approx(TRUE_S)
    assert world.sync(time) == pytest.approx(3600.0)
    assert time.now_s() == pytest.approx(TRUE_S + 3600.0)


@given(st.lists(offsets, max_size=5))
def test_a_file_has_the_machines_time_at_the_start_and_no_step_after(steps):
    world = World(shared=False, wall_off_s=77.0)
    time = world.time()
    for step_s in steps:
        world.wall_off_s = step_s
        world.true_s += 10.0
        assert world.sync(time) == 0.0
    assert time.now_s() == pytest.approx(TRUE_S + 77.0 + 10.0 * len(steps), abs=FLOAT_S)


def test_time_starts_at_the_newest_stored_moment_where_the_clock_is_behind_it():
    world = World(clock_off_s=-100.0)
    time = world.time()
    world.sync(time)
    time.not_before(TRUE_S)
    assert time.now_s() == TRUE_S
    world.sync(time)
    world.true_s += 10.0
    assert time.now_s() == pytest.approx(TRUE_S + 10.0 * (1 - SLEW))


@pytest.mark.parametrize("kind", kind_params())
async def test_the_real_clock_of_each_database_is_read(fresh_databases, kind):
    with fresh_databases.fresh(kind) as url:
        database = open_database(url)
        # A machine whose clock is an hour slow: only a database of several processes corrects it.
        time = DatabaseTime(wall=lambda: WallTime().now_s() - 3600.0)
        correction_s = await time.sync(database)
        assert correction_s == pytest.approx(3600.0 if database.shared else 0.0, abs=60.0)
        first, second = await database.read(lambda c: (database.clock_s(c), database.clock_s(c)))
        assert first < second or not database.shared, "a transaction's time stands still"
        await database.close()


def test_manual_time_stands_still():
    time = ManualTime(5.0)
    time.advance(2.0)
    assert time.now_s() == time.now_s() == 7.0
