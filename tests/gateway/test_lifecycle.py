"""The lifecycle as pure code, on a manual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_gateway import deadlines, lifecycle
from tide_gateway.lifecycle import ASLEEP_S, ENDED_S, Task, TurnVerdict
from tide_gateway.rows import Change, Intent, Result, all_columns, mutable_columns, task_of, turn_columns
from tide_sdk.clocks import RUNNING, ClockName, TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import Outcome

LIMITS = {
    ClockName.START: 5.0,
    ClockName.IDLE: 2.0,
    ClockName.TURN: 3.0,
    ClockName.ACTIVE: 20.0,
    ClockName.END: 1.0,
}


def starting(now_s: float = 0.0) -> Task:
    return lifecycle.new_task(
        task_id="t", owner="o", environment="e", key="k", attempt=0, kind="train", limits=LIMITS, now_s=now_s
    )


def waiting(now_s: float = 0.0) -> Task:
    return lifecycle.started(starting(now_s), "peer", now_s)


def code_of(call, *args, **kwargs) -> str:
    with pytest.raises(TideError) as caught:
        call(*args, **kwargs)
    return caught.value.code


def test_idle_runs_out_unpaused_and_stands_still_paused():
    task = waiting()
    assert deadlines.overdue(task, 1.999) is None
    assert deadlines.overdue(task, 2.0) == Outcome(kind="expired", clock=ClockName.IDLE)
    paused = lifecycle.pause(task, 1, 1.5)
    assert deadlines.overdue(paused, 1e9) is None
    resumed = lifecycle.resume(paused, 2, 1000.0)
    assert resumed.clocks[ClockName.IDLE].consumed(1000.2) == pytest.approx(1.7)


def test_a_turn_that_goes_on_changes_no_other_columns_than_are_written():
    before = lifecycle.pause(lifecycle.resume(lifecycle.pause(waiting(), 3, 0.1), 4, 0.2), 4, 0.25)
    acting = lifecycle.bumped(lifecycle.acting(before, 0.5, "r"))
    pausing = lifecycle.pause(acting, 5, 0.6)
    answers = [lifecycle.answered(task, 0.9, terminated=False, truncated=False) for task in (acting, pausing)]
    moves = [(before, acting), (acting, answers[0]), (pausing, answers[1])]
    changes = [
        Change(acting, intent=Intent(0, b"{}", 0.5)),
        *(Change(after, result=Result(0, b"{}", 0.9)) for after in answers),
    ]
    for (earlier, later), change in zip(moves, changes, strict=True):
        assert change.only_moves
        assert mutable_columns(earlier) | turn_columns(later) == mutable_columns(later)


def test_any_other_change_writes_all_columns():
    acting = lifecycle.acting(waiting(), 0.5)
    done = lifecycle.answered(acting, 0.9, terminated=True, truncated=False)
    assert not Change(done, result=Result(0, b"{}", 0.9)).only_moves
    assert not Change(lifecycle.pause(waiting(), 1, 0.5)).only_moves
    assert not Change(waiting(), intent=Intent(0, b"{}", 0.5)).only_moves


def test_g02_fifty_pauses_of_three_times_the_limit_leave_no_drift():
    task, now_s = waiting(), 0.0
    for number in range(50):
        now_s += 0.01
        task = lifecycle.pause(task, 2 * number + 1, now_s)
        now_s += 3 * LIMITS[ClockName.IDLE]
        task = lifecycle.resume(task, 2 * number + 2, now_s)
    assert task.clocks[ClockName.IDLE].remaining(now_s) == pytest.approx(1.5, abs=1e-9)


def test_idle_and_turn_begin_anew_with_each_turn_and_active_adds_up():
    task = lifecycle.acting(waiting(), 1.0)
    task = lifecycle.answered(task, 3.5, terminated=False, truncated=False)
    assert task.turn == 1
    assert task.clocks[ClockName.IDLE].consumed(3.5) == 0
    assert task.clocks[ClockName.TURN].consumed(3.5) == 0
    assert task.clocks[ClockName.ACTIVE].consumed(4.0) == 4.0


def test_a_pause_while_acting_takes_effect_with_the_answer_and_a_resume_cancels_it():
    pausing = lifecycle.pause(lifecycle.acting(waiting(), 0.5), 1, 1.0)
    assert pausing.state is TaskState.PAUSING
    assert deadlines.overdue(pausing, 3.5) == Outcome(kind="expired", clock=ClockName.TURN)
    assert lifecycle.answered(pausing, 2.0, terminated=False, truncated=False).state is TaskState.PAUSED
    acting = lifecycle.resume(pausing, 2, 1.5)
    assert acting.state is TaskState.ACTING
    assert acting.clocks[ClockName.TURN].consumed(2.0) == 1.5
    assert lifecycle.answered(acting, 2.0, terminated=False, truncated=False).state is TaskState.WAITING


def test_an_old_epoch_changes_nothing_and_none_keeps_the_present_one():
    paused = lifecycle.pause(waiting(), 7, 1.0)
    resumed = lifecycle.resume(paused, 8, 2.0)
    for late in (1, 7, 8):
        assert lifecycle.pause(resumed, late, 3.0) is resumed
    by_hand = lifecycle.pause(resumed, None, 3.0)
    assert (by_hand.state, by_hand.epoch) == (TaskState.PAUSED, 8)
    again = lifecycle.pause(by_hand, 9, 4.0)
    assert (again.state, again.epoch) == (TaskState.PAUSED, 9)


def test_verdicts_on_turns_by_state():
    task = waiting()
    assert lifecycle.take_turn(task, 0) is TurnVerdict.RUN
    assert code_of(lifecycle.take_turn, task, 1) == "turn_order"
    acting = lifecycle.acting(task, 0.0)
    assert lifecycle.take_turn(acting, 0) is TurnVerdict.JOIN
    assert code_of(lifecycle.take_turn, acting, 1) == "turn_order"
    next_turn = lifecycle.answered(acting, 0.0, terminated=False, truncated=False)
    assert lifecycle.take_turn(next_turn, 0) is TurnVerdict.STORED
    paused = lifecycle.pause(next_turn, 1, 0.0)
    assert lifecycle.take_turn(paused, 0) is TurnVerdict.STORED
    assert code_of(lifecycle.take_turn, paused, 1) == "paused"
    assert code_of(lifecycle.take_turn, paused, 2) == "turn_order"
    done = lifecycle.answered(lifecycle.acting(next_turn, 0.0), 0.0, terminated=True, truncated=False)
    assert lifecycle.take_turn(done, 1) is TurnVerdict.STORED
    assert code_of(lifecycle.take_turn, done, 2) == "state_conflict"
    assert lifecycle.pause(done, 5, 0.0) is done
    assert code_of(lifecycle.take_turn, starting(), 0) == "state_conflict"
    assert code_of(lifecycle.pause, starting(), 1, 0.0) == "state_conflict"


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(kind="expired", clock=ClockName.IDLE), "expired"),
        (Outcome(kind="aborted", reason="enough"), "ended"),
        (Outcome(kind="failed", reason="environment_lost"), "ended"),
        (Outcome(kind="aborted", reason=lifecycle.SUPERSEDED), "stale_attempt"),
    ],
)
def test_an_ended_task_says_why_and_still_tells_its_answers(outcome: Outcome, code: str):
    task = lifecycle.answered(lifecycle.acting(waiting(), 0.0), 0.0, terminated=False, truncated=False)
    ending = lifecycle.ending(task, outcome, 1.0)
    ended = lifecycle.released(ending, (3.0, {}), 2.0, "")
    for state in (ending, ended):
        assert code_of(lifecycle.take_turn, state, 1) == code
        assert code_of(lifecycle.pause, state, 1, 2.0) == code
        assert lifecycle.take_turn(state, 0) is TurnVerdict.STORED
    assert ended.reward == (None if outcome.kind == "failed" else 3.0)


def test_a_done_task_whose_account_is_lost_has_no_reward():
    done = lifecycle.answered(lifecycle.acting(waiting(), 0.0), 0.0, terminated=True, truncated=False)
    assert lifecycle.released(done, (0.5, {"x": 1}), 1.0, "").reward == 0.5
    lost = lifecycle.released(done, None, 1.0, "gone")
    assert lost.reward is None
    assert lost.outcome == Outcome(kind="failed", reason="environment_lost")


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["pause", "resume", "act", "answer", "finish", "end", "release"]),
        st.integers(1, 6),
        st.floats(-5, 50),
    ),
    max_size=40,
)


def step(task: Task, operation: str, number: int, now_s: float) -> Task:
    if operation == "pause":
        return lifecycle.pause(task, number, now_s)
    if operation == "resume":
        return lifecycle.resume(task, number, now_s)
    if operation == "act":
        if lifecycle.take_turn(task, task.turn) is TurnVerdict.RUN:
            return lifecycle.acting(task, now_s)
        return task
    if operation in ("answer", "finish") and lifecycle.is_busy(task):
        return lifecycle.answered(task, now_s, terminated=operation == "finish", truncated=False)
    if operation == "end" and lifecycle.is_open(task):
        return lifecycle.ending(task, Outcome(kind="aborted"), now_s)
    if operation == "release" and task.state is TaskState.ENDING:
        return lifecycle.released(task, (1.0, {}), now_s, "")
    return task


@given(OPERATIONS)
def test_whatever_happens_clocks_follow_the_state_and_never_run_backwards(operations):
    task, now_s = waiting(), 0.0
    for operation, number, passed_s in operations:
        before = task
        now_s += passed_s  # also backwards: a clock that was set back
        try:
            task = step(task, operation, number, now_s)
        except TideError:
            assert task is before
            continue
        assert task.turn >= before.turn
        assert task.epoch >= before.epoch
        for name, clock in task.clocks.items():
            assert clock.limit_s == LIMITS[name]
            assert (clock.running_since_s is not None) == (name in RUNNING[task.state])
            assert clock.consumed(now_s) >= 0
        active, was = task.clocks[ClockName.ACTIVE], before.clocks[ClockName.ACTIVE]
        assert active.consumed(now_s) >= was.consumed_s
        if before.state is TaskState.PAUSED:
            assert was.consumed(now_s) == was.consumed_s
        due_s = deadlines.due_s(task)
        assert (due_s == ENDED_S) == (task.state is TaskState.ENDED)
        assert (due_s == ASLEEP_S) == (task.state in (TaskState.PAUSED, TaskState.DONE))
        assert task_of(all_columns(task)) == replace(task, metrics=dict(task.metrics))
