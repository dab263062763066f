"""Belief and measurement part loudly, after patience, and come together again with hysteresis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_trainer.scheduling.reconcile import AlarmKind, Belief, BelievedCall, Measured, Reconciler, WatchSettings
from tide_trainer.types import RankId

RANK = RankId("w", 0)
CALL = BelievedCall("c1", "task", 100, 0.0)
BELIEF = Belief(RANK, 1000, 10, True, 100, (CALL,))
FITS = Measured(60, {"c1": (50, 6)})
SETTINGS = WatchSettings(patience=3, tolerance=0.1, grace_s=5.0)


def kinds(alarms):
    return [alarm.kind for alarm in alarms]


def faults():
    """Name -> (kind, belief, measured) of a look that is bad in one way."""
    return {
        "no answer": (AlarmKind.ENGINE_SILENT, BELIEF, None),
        "blocks unreadable": (AlarmKind.NO_CAPACITY, BELIEF, Measured(-10, {})),
        "requests unreadable": (AlarmKind.NO_CAPACITY, BELIEF, Measured(60, None)),
        "no cache": (AlarmKind.NO_CAPACITY, replace(BELIEF, kv_tokens=0), FITS),
        "a stranger": (AlarmKind.UNREPORTED, BELIEF, Measured(60, {"c1": (50, 6), "x": (0, 0)})),
        "gone": (AlarmKind.MISSING, BELIEF, Measured(0, {})),
        "one too long": (AlarmKind.ABOVE, BELIEF, Measured(60, {"c1": (50, 13)})),
        "all too much": (AlarmKind.ABOVE, BELIEF, Measured(121, {"c1": (50, 6)})),
        "evicted": (AlarmKind.EVICTED, replace(BELIEF, expected_tokens=100, found_tokens=79), FITS),
    }


@pytest.mark.parametrize("name", faults())
def test_t7_an_alarm_comes_after_patience_once_and_clears_after_as_many_good_looks(name):
    kind, belief, measured = faults()[name]
    good = replace(BELIEF, expected_tokens=100, found_tokens=95)
    reconciler = Reconciler(SETTINGS)
    for _ in range(2):
        assert reconciler.look(belief, measured, 10.0) == ((), ())
    raised, _ = reconciler.look(belief, measured, 11.0)
    assert kinds(raised) == [kind]
    assert (raised[0].rank, raised[0].since_s) == (RANK, 11.0)
    assert reconciler.look(belief, measured, 12.0) == ((), ()), "told once"
    assert reconciler.has_capacity(RANK) == (kind not in {AlarmKind.ENGINE_SILENT, AlarmKind.NO_CAPACITY})
    for _ in range(2):
        assert reconciler.look(good, FITS, 13.0) == ((), ())
    assert kinds(reconciler.alarms()) == [kind]
    _, cleared = reconciler.look(good, FITS, 14.0)
    assert kinds(cleared) == [kind]
    assert reconciler.alarms() == ()
    assert reconciler.has_capacity(RANK)


@pytest.mark.parametrize("name", faults())
def test_a_fault_that_comes_and_goes_raises_nothing(name):
    _, belief, measured = faults()[name]
    good = replace(BELIEF, expected_tokens=100, found_tokens=95)
    reconciler = Reconciler(SETTINGS)
    for look in range(30):
        bad = look % 3 < 2
        assert reconciler.look(*((belief, measured) if bad else (good, FITS)), 10.0) == ((), ())


def test_what_is_raised_clears_only_when_it_is_better_by_half_of_the_tolerance():
    reconciler = Reconciler(SETTINGS)
    for used_tokens, expected in ((121, [AlarmKind.ABOVE]), (116, [AlarmKind.ABOVE]), (114, [])):
        for _ in range(6):
            reconciler.look(BELIEF, Measured(used_tokens, {"c1": (50, 6)}), 10.0)
        assert kinds(reconciler.alarms()) == expected


def test_calls_and_requests_on_their_way_are_no_faults():
    reconciler = Reconciler(SETTINGS)
    young = replace(BELIEF, calls=(replace(CALL, since_s=6.0),), passing=frozenset({"c0"}))
    for _ in range(5):
        assert reconciler.look(young, Measured(10, {"c0": (5, 1)}), 10.0) == ((), ())


def test_a_missing_call_must_be_the_same_one_at_each_look():
    reconciler = Reconciler(SETTINGS)
    for look in range(9):
        belief = replace(BELIEF, calls=(replace(CALL, request=f"c{look}"),))
        assert reconciler.look(belief, Measured(0, {}), 10.0) == ((), ())


def test_requests_are_not_judged_during_a_sync_and_nothing_clears_then():
    reconciler = Reconciler(SETTINGS)
    closed = replace(BELIEF, gate_open=False)
    strange = Measured(60, {"c1": (50, 6), "parity": (3, 1)})
    for _ in range(9):
        assert reconciler.look(closed, strange, 10.0) == ((), ())
    for _ in range(3):
        reconciler.look(BELIEF, strange, 10.0)
    for _ in range(9):
        assert reconciler.look(closed, FITS, 10.0) == ((), ())
    assert kinds(reconciler.alarms()) == [AlarmKind.UNREPORTED]


def test_silence_is_not_taken_for_emptiness():
    reconciler = Reconciler(SETTINGS)
    for _ in range(3):
        reconciler.look(BELIEF, Measured(0, {}), 10.0)
    for _ in range(9):
        reconciler.look(BELIEF, None, 11.0)
    assert kinds(reconciler.alarms()) == [AlarmKind.MISSING, AlarmKind.ENGINE_SILENT]


def test_t8_ranks_of_one_worker_are_told_apart():
    reconciler = Reconciler(SETTINGS)
    other = replace(BELIEF, rank=RankId("w", 1))
    for _ in range(3):
        reconciler.look(BELIEF, None, 10.0)
        reconciler.look(other, FITS, 10.0)
    assert [alarm.rank for alarm in reconciler.alarms()] == [RANK]
    assert (reconciler.has_capacity(RANK), reconciler.has_capacity(RankId("w", 1))) == (False, True)
    assert kinds(reconciler.forget(RANK)) == [AlarmKind.ENGINE_SILENT]
    assert reconciler.alarms() == reconciler.forget(RANK) == ()


def test_an_alarm_names_three_and_counts_the_others():
    calls = tuple(replace(CALL, request=f"c{number}") for number in range(5))
    reconciler = Reconciler(SETTINGS)
    for _ in range(3):
        raised, _ = reconciler.look(replace(BELIEF, calls=calls), Measured(0, {}), 10.0)
    assert "c0 of task" in raised[0].message
    assert raised[0].message.endswith("and 2 more")


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), max_size=20),
    st.integers(1, 4),
    st.integers(10, 40),
)
def test_whatever_an_honest_engine_does_raises_nothing(requests, patience, looks):
    """An engine whose requests hold the blocks of what they have computed, at most what was believed."""
    reconciler = Reconciler(WatchSettings(patience=patience, tolerance=0.0))
    calls, measured, used, believed = [], {}, 0, 0
    for number, (need_tokens, done_tokens) in enumerate(requests):
        done_tokens = min(done_tokens, need_tokens)
        num_blocks = -(-done_tokens // 10)
        calls.append(BelievedCall(f"c{number}", "task", need_tokens, 0.0))
        measured[f"c{number}"] = (done_tokens, num_blocks)
        used, believed = used + 10 * num_blocks, believed + -(-need_tokens // 10) * 10
    belief = replace(BELIEF, calls=tuple(calls), usage_tokens=believed)
    for _ in range(looks):
        assert reconciler.look(belief, Measured(used, measured), 100.0) == ((), ())
