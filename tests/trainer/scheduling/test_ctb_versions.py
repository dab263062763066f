"""Model versions: gates per rank, tasks anchored to a version, and ranks that stay behind to serve them."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.plan import Admit, Grant, Pause, Phase, Refuse, Resume, SchedulerError
from tide_trainer.types import RankId

FIRST, SECOND = RankId("w", 0), RankId("w", 1)


def place_evaluation(made) -> tuple[RankId, RankId]:
    """Submits an evaluation task `e` anchored to version 0; returns its rank and the other one."""
    made.add("e", kind="eval", version=0)
    (admit,) = made.plan(0.0)
    return admit.rank, FIRST if admit.rank == SECOND else SECOND


def test_the_gate_of_one_rank_closes_alone(situation) -> None:
    made = situation(num_ranks=2)
    made.start("a", 50)
    made.start("b", 50)
    here = {view.rank: view.num_tasks for view in made.view().ranks}
    assert here == {FIRST: 1, SECOND: 1}
    made.close_gate([FIRST])
    made.on_call("a", 60, 10, 1.0)
    made.on_call("b", 950, 10, 1.0)
    assert {name for name, _ in made.decide(1.0)} == {"Grant", "Pause"}
    assert not made.view().gate_open
    made.open_gate(0, [FIRST])
    assert made.view().gate_open
    assert [type(decision) for decision in made.plan(2.0)] == [Resume]


def test_a_call_on_a_closed_rank_may_go_to_an_open_one_with_room_at_once(situation) -> None:
    made = situation(num_ranks=2, move_after_s=1000.0)
    made.start("a", 50)
    made.start("b", 50)
    made.close_gate([FIRST])
    made.on_call("a", 60, 10, 1.0)
    made.on_call("b", 60, 10, 1.0)
    made.add("c")
    decisions = [decision for decision in made.plan(1.0) if not isinstance(decision, Pause)]
    assert {(type(d), d.rank) for d in decisions} == {(Grant, SECOND), (Resume, SECOND), (Admit, SECOND)}


def test_a_rank_that_stays_behind_serves_only_what_is_anchored_to_it(situation) -> None:
    made = situation(num_ranks=2)
    behind, ahead = place_evaluation(made)
    made.start("t", 100)
    made.start("u", 100)
    assert {view.num_tasks for view in made.view().ranks} == {1, 2}
    made.close_gate([ahead])
    made.open_gate(1, [ahead])
    made.on_call("e", 50, 10, 1.0)
    made.on_call("t", 120, 10, 1.0)
    made.on_call("u", 120, 10, 1.0)
    made.add("late/0", "late/1", kind="eval", siblings=2, version=0)
    made.add("new")
    decisions = made.plan(1.0)
    granted = {
        decision.task: (decision.rank, decision.version) for decision in decisions if isinstance(decision, Grant)
    }
    assert granted == {"e": (behind, 0), "t": (ahead, 1), "u": (ahead, 1)}
    assert {d.task: d.rank for d in decisions if isinstance(d, Admit)} == {"late/0": behind, "new": ahead}
    made.check()


def test_calls_that_wait_on_a_rank_left_behind_move(situation) -> None:
    made = situation(num_ranks=2, move_after_s=1000.0)
    behind, ahead = place_evaluation(made)
    for task in ("t", "u", "v"):
        made.start(task, 50)
    made.close_gate()
    for task in ("t", "u", "v"):
        made.on_call(task, 70, 10, 1.0)
    assert {name for name, _ in made.decide(1.0)} == {"Pause"}
    made.open_gate(1, [ahead])
    made.open_gate(0, [behind])
    resumed = made.plan(2.0)
    assert [(type(d), d.rank, d.version) for d in resumed] == [(Resume, ahead, 1)] * 3
    made.check()


def test_a_task_in_flight_on_a_rank_left_behind_goes_elsewhere_at_its_next_call(situation) -> None:
    made = situation(num_ranks=2)
    made.add("t")
    (admit,) = made.plan(0.0)
    made.on_call("t", 50, 10, 0.0)
    made.plan(0.0)
    other = FIRST if admit.rank == SECOND else SECOND
    made.open_gate(1, [other])
    assert made.phase("t") is Phase.GENERATING
    made.on_turn("t", 55, 1.0)
    made.on_call("t", 60, 10, 1.0)
    (again,) = made.plan(1.0)
    assert (again.rank, again.version) == (other, 1)


def test_the_call_of_a_lost_version_is_refused_with_the_reason(situation) -> None:
    made = situation(max_tasks_per_rank=2)
    made.start("acts", 50, kind="eval", version=0)
    made.add("q/0", "q/1", "r/0", "r/1", kind="eval", siblings=2, version=0)
    assert made.decide(0.0) == [("Admit", "q/0")]
    made.open_gate(1)
    assert made.decide(1.0) == [("Refuse", "q/1"), ("Refuse", "r/0"), ("Refuse", "r/1")]
    made.on_call("acts", 60, 10, 1.0)
    (refuse,) = made.plan(1.0)
    assert isinstance(refuse, Refuse)
    assert "anchored to model version 0, which no rank serves any more (the newest is 1)" in refuse.reason
    for task in ("acts", "q/0", "q/1", "r/0", "r/1"):
        made.on_end(task, 2.0)
    made.check()
    assert made.view().ranks[0].num_tasks == 0


def test_the_death_of_the_rank_that_stayed_behind_refuses_what_waits_there(situation) -> None:
    made = situation(num_ranks=2)
    behind, ahead = place_evaluation(made)
    made.open_gate(1, [ahead])
    made.add("q", kind="eval", version=0)
    made.add("future", kind="eval", version=2)
    made.plan(0.0)
    made.close_gate([behind])
    made.on_call("e", 50, 10, 0.0)
    assert made.decide(0.0) == [("Pause", "e")]
    made.remove_rank(behind)
    assert made.decide(1.0) == [("Refuse", "e")]
    made.add("late", kind="eval", version=0)
    assert made.decide(1.0) == [("Refuse", "late")]
    assert made.phase("q") is Phase.ADMITTED, "it is refused at its call"
    assert made.phase("future") is Phase.QUEUED, "its version is still to come"
    made.open_gate(2)
    assert made.decide(2.0) == [("Admit", "future")]


def test_the_newest_version_is_waited_for_while_no_rank_serves_it(situation) -> None:
    made = situation(num_ranks=2)
    behind, ahead = place_evaluation(made)
    made.open_gate(1, [ahead])
    made.start("t", 50, now_s=1.0)
    made.remove_rank(ahead)
    made.on_call("t", 60, 10, 2.0)
    (pause,) = made.plan(2.0)
    assert "no rank serves its model version" in pause.reason
    made.on_end("e", 3.0)
    made.open_gate(1, [behind])
    assert made.decide(3.0) == [("Resume", "t")]


def test_a_full_rank_of_one_version_keeps_no_task_of_another_waiting(situation) -> None:
    made = situation(num_ranks=2, max_tasks_per_rank=1)
    place_evaluation(made)
    made.open_gate(1, [view.rank for view in made.view().ranks if view.num_tasks == 0])
    made.add("f", kind="eval", version=0)
    made.add("t")
    assert made.decide(1.0) == [("Admit", "t")]


def test_a_new_rank_waits_for_the_gate_and_may_bring_a_newer_version(situation) -> None:
    made = situation()
    made.add("t")
    made.close_gate()
    third = RankId("w", 2)
    made.add_rank(third, 1000, 1, 1)
    assert made.plan(0.0) == ()
    made.open_gate(1)
    assert made.decide(0.0) == [("Admit", "t")]
    with pytest.raises(SchedulerError, match="serves model version 1, newer than 0"):
        made.open_gate(0)


def test_versions_of_a_warm_start_are_negative(situation) -> None:
    made = situation(num_ranks=0)
    made.add_rank(FIRST, 1000, 1, -1000)
    made.open_gate(-999)
    made.add("t")
    made.add("e", kind="eval", version=-999)
    assert sorted(made.decide(0.0)) == [("Admit", "e"), ("Admit", "t")]
