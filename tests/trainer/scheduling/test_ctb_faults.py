"""Faults that users of comparable systems reported (FAULTS T2, T5 to T9), and ranks that come and go."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Admit, Grant, Pause, Phase, Refuse, Resume, SchedulerError, TaskEntry
from tide_trainer.scheduling.settings import CtbSettings, FootprintPrior
from tide_trainer.types import RankId

FIRST, SECOND = RankId("w", 0), RankId("w", 1)


def make(*ranks: RankId, budget_tokens: int = 300, **options) -> TaskScheduler:
    options.setdefault("default_prior", FootprintPrior(prompt_tokens=10, final_tokens=20))
    options.setdefault("grant_fraction", 0.95)
    made = TaskScheduler(CtbSettings(**options))
    for rank in ranks:
        made.add_rank(rank, budget_tokens)
    return made


def admit(made: TaskScheduler, *tasks: str) -> dict[str, RankId]:
    for task in tasks:
        made.submit(TaskEntry(task, task, "train", 1, "env"))
    return {decision.task: decision.rank for decision in made.plan(0.0) if isinstance(decision, Admit)}


def act(made: TaskScheduler, task: str, prompt_tokens: int, now_s: float = 0.0) -> None:
    made.on_call(task, prompt_tokens, 10, now_s)
    made.plan(now_s)
    made.on_turn(task, prompt_tokens + 10, now_s)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_t2_capacity_is_that_of_each_rank_and_never_divided_to_nothing(num_ranks: int) -> None:
    ranks = [RankId("w", index) for index in range(num_ranks)]
    made = make(*ranks, budget_tokens=40)
    made.set_environment_capacity("env", num_ranks)
    placed = admit(made, *(f"t{k}" for k in range(2 * num_ranks)))
    assert sorted(placed.values()) == ranks, "one task fits each rank, and the environment's capacity is that of all"


def test_t5_a_task_that_must_be_of_one_version_never_continues_at_another() -> None:
    made = make(FIRST)
    made.submit(TaskEntry("whole", "whole", "train", 1, "env", version=0))
    made.submit(TaskEntry("partial", "partial", "train", 1, "env"))
    made.plan(0.0)
    for task in ("whole", "partial"):
        act(made, task, 50)
    made.close_gate()
    for task in ("whole", "partial"):
        made.on_call(task, 60, 10, 1.0)
    made.plan(1.0)
    made.open_gate(1)
    decisions = {decision.task: decision for decision in made.plan(2.0)}
    assert isinstance(decisions["whole"], Refuse)
    assert isinstance(decisions["partial"], Resume)
    assert decisions["partial"].version == 1


def test_t6_a_call_aborted_by_a_sync_is_made_again() -> None:
    made = make(FIRST)
    admit(made, "a")
    made.on_call("a", 50, 10, 0.0)
    made.plan(0.0)
    made.close_gate()
    made.on_abort("a", 1.0)
    assert made.view().ranks[0].usage_tokens == 0
    made.on_call("a", 50, 10, 1.0)
    assert [type(d) for d in made.plan(1.0)] == [Pause]
    made.open_gate(1)
    assert [type(d) for d in made.plan(2.0)] == [Resume]


def test_t7_without_capacity_data_it_is_not_ready_and_says_so() -> None:
    made = make()
    assert not made.view().ready
    with pytest.raises(SchedulerError, match="without capacity data"):
        made.add_rank(FIRST, 0)
    with pytest.raises(SchedulerError, match="at least one block of 32"):
        made.add_rank(FIRST, 31, block_tokens=32)
    assert not made.view().ready
    assert admit(made, "a") == {}
    made.add_rank(FIRST, 100)
    assert made.view().ready
    assert [type(d) for d in made.plan(0.0)] == [Admit]


def test_t8_ranks_are_keyed_by_worker_and_index() -> None:
    ranks = [RankId(worker, index) for worker in ("u", "w") for index in (0, 1)]
    made = make(*ranks, max_tasks_per_rank=1)
    placed = admit(made, "a", "b", "c", "d", "e")
    assert sorted(placed.values()) == sorted(ranks)
    assert made.remove_rank(RankId("u", 1)) == (next(t for t, r in placed.items() if r == RankId("u", 1)),)
    assert len(made.view().ranks) == 3


def test_t9_a_long_tail_keeps_no_other_rank_idle() -> None:
    made = make(FIRST, SECOND)
    placed = admit(made, "long")
    made.on_call("long", 270, 10, 0.0)
    made.plan(0.0)
    waiting = [f"s{k}" for k in range(10)]
    admit(made, *waiting)
    num_rounds = 0
    while waiting:
        busy = {view.rank: view.num_tasks for view in made.view().ranks}
        assert busy.pop(placed["long"]) == 1
        assert min(busy.values()) > 0
        for task in [task for task in waiting if made.phase(task) is Phase.ADMITTED]:
            act(made, task, 20)
            made.on_end(task, 0.0)
            made.plan(0.0)
            waiting.remove(task)
        num_rounds += 1
    assert num_rounds <= 5
    assert made.phase("long") is Phase.GENERATING


def test_tasks_of_a_dead_rank_are_placed_anew_at_their_next_call() -> None:
    made = make(FIRST, SECOND)
    placed = admit(made, "acting", "generating", "x", "y")
    dead = placed["acting"]
    assert placed["generating"] != dead
    act(made, "acting", 50)
    made.on_call("generating", 50, 10, 0.0)
    made.plan(0.0)
    for rank in (dead, placed["generating"]):
        gone = made.remove_rank(rank)
        assert set(gone) == {task for task, at in placed.items() if at == rank}
    made.check()
    assert made.phase("generating") is Phase.ACTING
    made.on_call("generating", 50, 10, 1.0)
    made.on_call("acting", 60, 10, 1.0)
    decisions = made.plan(1.0)
    assert [type(d) for d in decisions] == [Pause, Pause]
    assert "no rollout rank" in decisions[0].reason
    made.add_rank(SECOND, 300)
    resumed = made.plan(2.0)
    assert {(type(d), d.task) for d in resumed} == {(Resume, "generating"), (Resume, "acting")}
    made.check()


def test_an_answer_that_arrives_after_its_rank_is_gone_still_counts() -> None:
    made = make(FIRST)
    admit(made, "a")
    made.on_call("a", 50, 10, 0.0)
    made.plan(0.0)
    made.remove_rank(FIRST)
    made.on_turn("a", 55, 1.0)
    made.add_rank(SECOND, 300)
    made.on_call("a", 60, 10, 2.0)
    assert [type(d) for d in made.plan(2.0)] == [Grant]


def test_calls_held_or_paused_on_a_dead_rank_go_to_another() -> None:
    made = make(FIRST, SECOND, budget_tokens=200)
    placed = admit(made, "a", "b")
    made.on_call("a", 100, 10, 0.0)
    made.on_call("b", 100, 10, 0.0)
    made.remove_rank(placed["b"])
    assert [(type(d), d.task) for d in made.plan(0.0)] == [(Grant, "a"), (Pause, "b")]
    made.on_end("a", 1.0)
    (resume,) = made.plan(1.0)
    assert isinstance(resume, Resume)
    assert resume.rank == placed["a"]


def test_a_call_that_only_the_dead_rank_could_hold_is_refused() -> None:
    made = make(FIRST)
    made.add_rank(SECOND, 1000)
    admit(made, "a")
    act(made, "a", 250)
    made.on_call("a", 400, 10, 1.0)
    made.remove_rank(SECOND)
    assert [(type(d), d.task) for d in made.plan(1.0)] == [(Refuse, "a")]
    made.on_end("a", 1.0)
    made.check()


def test_a_paused_task_moves_to_a_rank_with_room_after_a_while() -> None:
    made = make(FIRST, SECOND, move_after_s=2.0)
    placed = admit(made, "a", "b", "c", "d")
    here = placed["a"]
    mine = [task for task in placed if placed[task] == here]
    for task in placed:
        act(made, task, 90)
    made.on_call(mine[0], 150, 30, 1.0)
    made.plan(1.0)
    made.on_call(mine[1], 120, 10, 1.0)
    assert [type(d) for d in made.plan(1.0)] == [Pause]
    elsewhere = next(task for task in placed if placed[task] != here)
    made.on_end(elsewhere, 1.5)
    assert made.plan(1.5) == ()
    (resume,) = made.plan(3.0)
    assert isinstance(resume, Resume)
    assert resume.rank != here


def test_after_a_sync_paused_tasks_may_go_anywhere_at_once() -> None:
    made = make(FIRST, SECOND, move_after_s=1000.0)
    placed = admit(made, "a", "b", "c", "d")
    here = placed["a"]
    mine = [task for task in placed if placed[task] == here]
    for task in placed:
        act(made, task, 90)
    for task in placed:
        if placed[task] != here:
            made.on_end(task, 1.0)
    made.close_gate()
    for task in mine:
        made.on_call(task, 200, 10, 1.0)
    made.plan(1.0)
    made.open_gate(1)
    assert {d.rank for d in made.plan(2.0) if isinstance(d, Resume)} == {FIRST, SECOND}


def test_a_withdrawn_task_leaves_nothing_behind_in_any_phase() -> None:
    made = make(FIRST, budget_tokens=300, max_tasks_per_rank=4)
    admit(made, "acting", "generating", "paused", "admitted", "queued")
    act(made, "acting", 90)
    made.on_call("generating", 150, 10, 0.0)
    made.on_call("paused", 150, 10, 0.0)
    made.plan(0.0)
    phases = {task: made.phase(task).value for task in ("acting", "generating", "paused", "admitted", "queued")}
    assert all(task == phase for task, phase in phases.items())
    made.on_call("acting", 100, 10, 1.0)
    for task in phases:
        made.withdraw(task)
        made.check()
    view = made.view()
    assert view.ranks[0].usage_tokens == view.ranks[0].projected_tokens == view.ranks[0].num_tasks == 0
