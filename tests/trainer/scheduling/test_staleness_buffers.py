"""The staleness protocol on worked examples, and its errors."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.staleness import (
    BuffersSnapshot,
    BufferState,
    EntryRecord,
    NoPlaceError,
    NotReadyError,
    StalenessBuffers,
    StalenessError,
    UnknownEntryError,
)


def occupied(buffers: StalenessBuffers, place: int) -> list[str]:
    return [r.entry for r in buffers.snapshot().entries if r.buffer == place and r.occupied]


def place_of(buffers: StalenessBuffers, entry: str) -> int:
    return next(r.buffer for r in buffers.snapshot().entries if r.entry == entry)


def test_the_story_of_figure_7_left() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=6, version=1)
    # T1: trajectories 1 to 6 start at V1; their worst place is the buffer of V2.
    assert [buffers.reserve(str(k), 1) for k in range(1, 7)] == [2] * 6
    # T1': 1 completes and goes to the earliest place.
    assert buffers.occupy("1") == 1
    # T2: both buffers wait, so 7 may start at V1.
    assert [view.state for view in buffers.states()] == [BufferState.WAITING, BufferState.WAITING]
    assert buffers.reserve("7", 1) == 2
    assert [buffers.occupy(str(k)) for k in range(2, 7)] == [1] * 5
    assert buffers.ready()
    assert buffers.consume() == ("1", "2", "3", "4", "5", "6")
    # T2': the buffer of V2 becomes Stuck: no more V1, while V2 reserves in the new buffer of V3.
    for k in range(8, 13):
        assert buffers.reserve(str(k), 1) == 2
    assert buffers.states()[0].state is BufferState.STUCK
    assert not buffers.can_reserve(1)
    assert buffers.reserve("13", 2) == 3


def test_deletion_moves_as_in_figure_7_right() -> None:
    buffers = StalenessBuffers(eta=2, batch_size=1, version=1)
    assert (buffers.reserve("A", 1), buffers.reserve("B", 1), buffers.reserve("C", 0)) == (3, 2, 1)
    # C (0 + 2 < 3) cannot take A's place, B can; C then takes B's, and A the earliest.
    assert buffers.occupy("A") == 1
    assert (place_of(buffers, "B"), place_of(buffers, "C")) == (3, 2)
    assert buffers.ready()


def test_reservations_scan_backward_and_stop_at_the_trainers_version() -> None:
    buffers = StalenessBuffers(eta=2, batch_size=2, version=5)
    assert [buffers.reserve(f"g{k}", 5) for k in range(6)] == [7, 7, 6, 6, 5, 5]
    assert buffers.capacity_left(5) == 0
    with pytest.raises(NoPlaceError, match=r"'g6' of version 5: buffers 5 to 7 .* full"):
        buffers.reserve("g6", 5)


def test_an_old_version_has_fewer_places() -> None:
    buffers = StalenessBuffers(eta=2, batch_size=4, version=5)
    assert [buffers.capacity_left(v) for v in (2, 3, 4, 5, 6)] == [0, 4, 8, 12, 0]
    assert not buffers.can_reserve(2)
    assert not buffers.can_reserve(6)


def test_eta_zero_is_on_policy() -> None:
    buffers = StalenessBuffers(eta=0, batch_size=1)
    buffers.reserve("a", 0)
    assert not buffers.can_reserve(0)
    buffers.occupy("a")
    assert buffers.consume() == ("a",)
    assert buffers.version == 1
    assert not buffers.can_reserve(0)
    assert buffers.can_reserve(1)


def test_aborting_a_reservation_pulls_complete_groups_forward() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=2, version=1)
    for entry in ("a", "b"):
        buffers.reserve(entry, 0)
    for entry in ("c", "d"):
        buffers.reserve(entry, 1)
    assert [buffers.occupy(entry) for entry in ("a", "c")] == [1, 2]
    assert not buffers.ready()
    buffers.delete("b")
    assert buffers.ready()
    assert set(occupied(buffers, 1)) == {"a", "c"}


def test_filtering_a_complete_group_closes_up() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=2, version=1)
    for entry in "abc":
        buffers.reserve(entry, 1)
        buffers.occupy(entry)
    assert occupied(buffers, 2) == ["c"]
    buffers.delete("a")
    assert set(occupied(buffers, 1)) == {"b", "c"}
    assert buffers.ready()


def test_t4_a_filtered_group_frees_room_for_a_new_one() -> None:
    """T4: with nine of ten groups filtered, training still goes on."""
    buffers = StalenessBuffers(eta=1, batch_size=4)
    started = 0
    while buffers.version < 5:
        while buffers.can_reserve(buffers.version):
            buffers.reserve(f"g{started}", buffers.version)
            started += 1
        for entry in [r.entry for r in buffers.snapshot().entries if not r.occupied]:
            if int(entry[1:]) % 10:
                buffers.delete(entry)
            elif not buffers.ready():
                buffers.occupy(entry)
        if buffers.ready():
            buffers.consume()
    assert started < 10 * 4 * 7


def test_lower_keeps_the_minimum_and_moves_forward() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=2, version=3)
    assert buffers.reserve("a", 3) == 4
    assert buffers.lower("a", 3) == 4
    assert buffers.lower("a", 2) == 3
    assert buffers.lower("a", 3) == 3
    assert buffers.version_of("a") == 2
    with pytest.raises(NoPlaceError, match="version 1"):
        buffers.lower("a", 1)
    assert buffers.version_of("a") == 2


def test_lower_changes_places_with_a_newer_reservation() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=1, version=3)
    assert (buffers.reserve("a", 3), buffers.reserve("b", 3)) == (4, 3)
    assert buffers.lower("a", 2) == 3
    assert place_of(buffers, "b") == 4
    with pytest.raises(NoPlaceError, match="full"):
        buffers.lower("b", 2)


def test_a_complete_group_cannot_become_older() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=1, version=3)
    buffers.reserve("a", 3)
    buffers.occupy("a")
    with pytest.raises(StalenessError, match="complete"):
        buffers.lower("a", 2)


def test_a_stuck_buffer_names_what_it_waits_for() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=2, version=1)
    buffers.reserve("a", 0)
    assert buffers.stuck() == ()
    buffers.reserve("b", 0)
    assert buffers.stuck() == ("a", "b")
    buffers.occupy("a")
    assert buffers.stuck() == ("b",)
    buffers.delete("b")
    assert buffers.stuck() == ()


def test_redundant_groups_beyond_the_batch_are_surplus_where_no_later_buffer_admits_them() -> None:
    buffers = StalenessBuffers(eta=0, batch_size=2, num_spare=2)
    for entry in "abcd":
        buffers.reserve(entry, 0)
    assert not buffers.can_reserve(0)
    for entry in "dba":
        buffers.occupy(entry)
    assert buffers.ready()
    assert buffers.consume() == ("d", "b")
    assert set(buffers.surplus) == {"a", "c"}
    assert len(buffers) == 0


def test_redundant_groups_that_a_later_buffer_admits_live_on() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=1, version=3, num_spare=1)
    assert [buffers.reserve(entry, 3) for entry in "ab"] == [4, 4]
    assert [buffers.reserve(entry, 2) for entry in "cd"] == [3, 3]
    buffers.occupy("c")
    buffers.delete("a")
    assert buffers.consume() == ("c",)
    # d of version 2 fits no buffer of version 4 with eta 1; b waits on in its own.
    assert buffers.surplus == ("d",)
    assert place_of(buffers, "b") == 4


def test_complete_redundant_groups_carry_over_to_the_next_batch() -> None:
    buffers = StalenessBuffers(eta=1, batch_size=1, num_spare=1)
    for entry in "ab":
        buffers.reserve(entry, 0)
    for entry in "ab":
        buffers.occupy(entry)
    assert buffers.consume() == ("a",)
    assert buffers.surplus == ()
    assert buffers.consume() == ("b",)


def test_misuse_is_named() -> None:
    buffers = StalenessBuffers(eta=0, batch_size=2)
    buffers.reserve("a", 0)
    with pytest.raises(StalenessError, match="'a' is already in buffer 0"):
        buffers.reserve("a", 0)
    with pytest.raises(StalenessError, match="newer than the trainer's 0"):
        buffers.reserve("b", 1)
    for call in (buffers.occupy, buffers.delete, buffers.version_of):
        with pytest.raises(UnknownEntryError, match="'x'"):
            call("x")
    with pytest.raises(NotReadyError, match="0 of 2 groups complete and 1 in flight"):
        buffers.consume()
    buffers.occupy("a")
    with pytest.raises(StalenessError, match="already occupied"):
        buffers.occupy("a")
    with pytest.raises(StalenessError, match="batch_size is 0"):
        StalenessBuffers(eta=0, batch_size=0)


def test_t1_resume_keeps_the_bound_and_the_capacity() -> None:
    """T1: resumed at version 7 with eta 1, never more than two batches are admitted."""
    buffers = StalenessBuffers(eta=1, batch_size=4, version=7)
    for k in range(5):
        buffers.reserve(f"g{k}", 6 + k % 2)
    buffers.occupy("g0")
    restored = StalenessBuffers.restore(buffers.snapshot())
    assert restored.snapshot() == buffers.snapshot()
    more = 0
    while restored.can_reserve(7):
        restored.reserve(f"new{more}", 7)
        more += 1
    assert len(restored) == 8


@pytest.mark.parametrize(
    ("records", "message"),
    [
        # T3: complete at version 0, restored at version 3: too old for every buffer.
        ((EntryRecord("a", 0, 3, True),), "'a' of version 0 breaks eta 1"),
        ((EntryRecord("a", 3, 9, True),), "buffer 9 is not one of 3 to 4"),
        ((EntryRecord("a", 3, 3, True), EntryRecord("a", 3, 4, True)), "there twice"),
        (tuple(EntryRecord(str(k), 3, 3, True) for k in range(3)), "holds 3 of 2"),
    ],
)
def test_t3_a_snapshot_that_breaks_the_bound_is_refused(records: tuple[EntryRecord, ...], message: str) -> None:
    with pytest.raises(StalenessError, match=message):
        StalenessBuffers.restore(BuffersSnapshot(eta=1, batch_size=2, version=3, entries=records))


def test_t3_a_complete_group_that_waits_too_long_blocks_instead_of_ageing() -> None:
    """T3: complete at v0 in a later buffer; the versions go on only by consuming, so that it is consumed in time."""
    buffers = StalenessBuffers(eta=1, batch_size=1)
    for entry in ("a", "b"):
        buffers.reserve(entry, 0)
        buffers.occupy(entry)
    assert buffers.consume() == ("a",)
    assert not buffers.can_reserve(0)
    assert buffers.consume() == ("b",)
    assert buffers.version == 2


@pytest.mark.parametrize("eta", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_t10_a_run_ends_after_its_train_steps(eta: int, num_steps: int) -> None:
    """T10: rollout that keeps one version behind never blocks the last train step."""
    buffers = StalenessBuffers(eta=eta, batch_size=2)
    started, trained, rollout_version = 0, 0, 0
    for _ in range(100):
        if buffers.version == num_steps:
            break
        while started < 2 * num_steps and buffers.can_reserve(rollout_version):
            buffers.reserve(str(started), rollout_version)
            started += 1
        for record in buffers.snapshot().entries:
            if not record.occupied:
                buffers.occupy(record.entry)
        if buffers.ready():
            trained += len(buffers.consume())
            rollout_version = buffers.version
    assert (buffers.version, trained) == (num_steps, 2 * num_steps)
