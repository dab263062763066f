"""The staleness protocol under random operations, against a plain model."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tide_trainer.scheduling.staleness import BufferState, NoPlaceError, StalenessBuffers

PICK = st.integers(0, 10**6)


def chosen(options: list, pick: int):
    return options[pick % len(options)]


def assert_placed_well(buffers: StalenessBuffers) -> None:
    """Invariant 2, and the two rules of placement: reservations as late and complete groups as early as they may."""
    buffers.check()
    views = {view.version: view for view in buffers.states()}
    free = {v for v, view in views.items() if view.state is BufferState.WAITING}
    for record in buffers.snapshot().entries:
        assert record.version + buffers.eta >= record.buffer
        if record.occupied:
            assert not any(v < record.buffer for v in free)
        else:
            assert not any(record.buffer < v <= record.version + buffers.eta for v in free)


class StalenessMachine(RuleBasedStateMachine):
    @initialize(eta=st.integers(0, 4), batch_size=st.integers(1, 4), version=st.integers(0, 3))
    def start(self, eta: int, batch_size: int, version: int) -> None:
        self.buffers = StalenessBuffers(eta, batch_size, version)
        self.versions: dict[str, int] = {}
        self.complete: set[str] = set()
        self.started = 0

    def in_flight(self) -> list[str]:
        return sorted(set(self.versions) - self.complete)

    @rule(ages=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def reserve_some(self, ages: list[int]) -> None:
        for age in ages:
            self.reserve(age)

    def reserve(self, age: int) -> None:
        buffers, version = self.buffers, self.buffers.version - age
        uid = f"g{self.started}"
        latest = [
            view.version
            for view in buffers.states()
            if view.state is BufferState.WAITING and view.version <= version + buffers.eta
        ]
        assert buffers.can_reserve(version) == bool(latest) == (buffers.capacity_left(version) > 0)
        if not latest:
            with pytest.raises(NoPlaceError):
                buffers.reserve(uid, version)
            return
        assert buffers.reserve(uid, version) == latest[-1]
        self.versions[uid] = version
        self.started += 1

    @precondition(lambda self: self.in_flight())
    @rule(pick=PICK)
    def occupy(self, pick: int) -> None:
        uid = chosen(self.in_flight(), pick)
        before = next(r.buffer for r in self.buffers.snapshot().entries if r.entry == uid)
        assert self.buffers.occupy(uid) <= before
        self.complete.add(uid)

    @precondition(lambda self: self.versions)
    @rule(pick=PICK)
    def delete(self, pick: int) -> None:
        uid = chosen(sorted(self.versions), pick)
        self.buffers.delete(uid)
        self.complete.discard(uid)
        del self.versions[uid]

    @precondition(lambda self: self.in_flight())
    @rule(pick=PICK, age=st.integers(0, 4))
    def lower(self, pick: int, age: int) -> None:
        uid = chosen(self.in_flight(), pick)
        version = self.buffers.version - age
        before = self.buffers.snapshot()
        try:
            self.buffers.lower(uid, version)
        except NoPlaceError:
            assert self.buffers.snapshot() == before
        else:
            self.versions[uid] = min(self.versions[uid], version)

    @precondition(lambda self: self.buffers.ready())
    @rule()
    def consume(self) -> None:
        at = self.buffers.version
        entries = self.buffers.consume()
        assert len(entries) == self.buffers.batch_size
        assert self.buffers.version == at + 1
        for uid in entries:
            assert self.versions.pop(uid) + self.buffers.eta >= at
            self.complete.remove(uid)

    @rule()
    def restart(self) -> None:
        self.buffers = StalenessBuffers.restore(self.buffers.snapshot())

    @invariant()
    def placed_well(self) -> None:
        if not hasattr(self, "buffers"):
            return
        assert_placed_well(self.buffers)
        records = self.buffers.snapshot().entries
        assert {r.entry: r.version for r in records} == self.versions
        assert {r.entry for r in records if r.occupied} == self.complete


StalenessMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestStalenessMachine = StalenessMachine.TestCase


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("eta", [0, 1, 2, 4])
def test_long_random_runs_keep_every_invariant(eta: int, batch_size: int) -> None:
    """The same rules in a mix that keeps the buffers nearly full, checked after every operation."""
    choose = random.Random(10 * eta + batch_size)
    machine = StalenessMachine()
    machine.start(eta, batch_size, version=0)
    for _ in range(2000):
        pick, dice = choose.randrange(10**6), choose.random()
        if dice < 0.5:
            machine.reserve(choose.randint(0, eta + 1))
        elif dice < 0.7 and machine.in_flight():
            machine.occupy(pick)
        elif dice < 0.8 and machine.versions:
            machine.delete(pick)
        elif dice < 0.9 and machine.in_flight():
            machine.lower(pick, choose.randint(0, eta))
        elif dice < 0.98 and machine.buffers.ready():
            machine.consume()
        elif dice > 0.99:
            machine.restart()
        machine.placed_well()
    assert machine.buffers.version > 10


@pytest.mark.parametrize("eta", [0, 1, 3, 10])
def test_a_hundred_thousand_operations_keep_every_invariant(eta: int) -> None:
    choose = random.Random(eta)
    buffers = StalenessBuffers(eta, batch_size=8)
    in_flight: list[str] = []
    num_done = num_started = num_consumed = num_deleted = 0
    while num_done < 100_000:
        dice = choose.random()
        num_done += 1
        if dice < 0.5:
            version = buffers.version - choose.randint(0, min(eta, buffers.version))
            if buffers.can_reserve(version):
                buffers.reserve(str(num_started), version)
                in_flight.append(str(num_started))
                num_started += 1
        elif dice < 0.85 and in_flight:
            buffers.occupy(in_flight.pop(choose.randrange(len(in_flight))))
        elif dice < 0.9 and in_flight:
            buffers.delete(in_flight.pop(choose.randrange(len(in_flight))))
            num_deleted += 1
        elif buffers.ready():
            num_consumed += len(buffers.consume())
        if num_done % 100 == 0:
            assert_placed_well(buffers)
    assert num_started == num_consumed + num_deleted + len(buffers)
    assert buffers.version > 1000
