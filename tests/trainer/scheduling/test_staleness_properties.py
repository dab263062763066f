"""The staleness protocol under random operations, against a plain model."""

from __future__ import annotations

import random

import pytest
import soak_staleness
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tide_trainer.scheduling.staleness import BufferState, EntryRecord, NoPlaceError, StalenessBuffers
from tide_trainer.scheduling.staleness_resume import restore_complete

PICK = st.integers(0, 10**6)


def chosen(options: list, pick: int):
    return options[pick % len(options)]


def assert_placed_well(buffers: StalenessBuffers) -> None:
    """Invariant 2, and the two rules of placement: reservations as late and complete groups as early as they may."""
    buffers.check()
    views = {view.version: view for view in buffers.states()}
    snapshot = buffers.snapshot()
    capacity = buffers.batch_size + snapshot.num_spare
    free = {v for v, view in views.items() if view.num_occupied + view.num_reserved < capacity}
    wanting = {v for v in free if views[v].state is not BufferState.READY}
    for record in snapshot.entries:
        assert record.version + buffers.eta >= record.buffer
        if record.occupied:
            assert not any(v < record.buffer for v in wanting)
        else:
            assert not any(record.buffer < v <= record.version + buffers.eta for v in free)


class StalenessMachine(RuleBasedStateMachine):
    @initialize(
        eta=st.integers(0, 4), batch_size=st.integers(1, 4), version=st.integers(0, 3), num_spare=st.integers(0, 3)
    )
    def start(self, eta: int, batch_size: int, version: int, num_spare: int = 0) -> None:
        self.buffers = StalenessBuffers(eta, batch_size, version, num_spare)
        self.stored: dict[str, EntryRecord] = {}
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
            if view.num_occupied + view.num_reserved < buffers.batch_size + buffers.snapshot().num_spare
            and view.version <= version + buffers.eta
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
        for uid in self.buffers.surplus:
            assert self.buffers.snapshot().num_spare
            del self.versions[uid]
            self.complete.discard(uid)

    @rule()
    def restart(self) -> None:
        self.follow()
        assert {*self.stored.values()} == {*self.buffers.snapshot().entries}
        self.buffers = StalenessBuffers.restore(self.buffers.snapshot())

    @rule(back=st.integers(0, 3))
    def resume(self, back: int) -> None:
        """The trainer is killed; it goes on with the complete groups, maybe from an older version."""
        old, version = self.buffers.snapshot(), max(0, self.buffers.version - back)
        self.buffers = StalenessBuffers(old.eta, old.batch_size, version, old.num_spare)
        complete = [record for record in old.entries if record.occupied]
        left = restore_complete(self.buffers, complete)
        if not back:
            assert not left
        self.complete -= {*left}
        self.versions = {uid: self.versions[uid] for uid in self.complete}
        self.buffers.take_changes()
        self.stored = {record.entry: record for record in self.buffers.snapshot().entries}

    def follow(self) -> None:
        """A store that writes every change, in order."""
        changes = self.buffers.take_changes()
        self.stored.update({record.entry: record for record in changes.put})
        for uid in changes.gone:
            self.stored.pop(uid, None)

    @invariant()
    def placed_well(self) -> None:
        if not hasattr(self, "buffers"):
            return
        assert_placed_well(self.buffers)
        self.follow()
        assert {*self.stored.values()} == {*self.buffers.snapshot().entries}
        assert len(self.buffers) <= (self.buffers.eta + 1) * (
            self.buffers.batch_size + self.buffers.snapshot().num_spare
        )
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


@pytest.mark.parametrize("eta", soak_staleness.ETAS)
def test_the_soak_in_small_keeps_every_invariant_and_its_costs(eta: int) -> None:
    """10^4 operations of `make soak-staleness`; the costs are counted: O(eta + batch) looks and moves an operation."""
    told = soak_staleness.soak(eta, 10_000, every=20)
    assert told["violations"] == []
    assert told["consumed"] > 1000
    assert told["surplus"] > 0
    assert told["restored"] > 0


@pytest.mark.parametrize("batch_size", [4, 32])
@pytest.mark.parametrize("eta", [1, 8, 64])
def test_an_operation_looks_at_each_buffer_a_fixed_number_of_times(eta: int, batch_size: int) -> None:
    choose = random.Random(eta)
    buffers = StalenessBuffers(eta, batch_size)
    in_flight: list[str] = []
    most = num_started = 0
    for _ in range(3000):
        before = buffers.num_looks
        version = buffers.version - choose.randint(0, min(eta, buffers.version))
        dice = choose.random()
        if dice < 0.5 and buffers.can_reserve(version):
            buffers.reserve(str(num_started), version)
            in_flight.append(str(num_started))
            num_started += 1
        elif dice < 0.9 and in_flight:
            operation = buffers.occupy if dice < 0.8 else buffers.delete
            operation(in_flight.pop(choose.randrange(len(in_flight))))
        elif buffers.ready():
            buffers.consume()
        most = max(most, buffers.num_looks - before)
    assert most <= 8 * (eta + 1) + batch_size
