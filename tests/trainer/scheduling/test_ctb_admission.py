"""Which new tasks start, when and where; and how the scheduler answers misuse."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.plan import (
    Admit,
    Phase,
    SchedulerError,
    SchedulerFullError,
    TaskEntry,
    UnknownRankError,
    WrongPhaseError,
)
from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.types import RankId

RANK = RankId("w", 0)
OTHER = RankId("w", 1)


def test_paused_tasks_go_before_new_ones(situation) -> None:
    made = situation(budget_tokens=300)
    made.start("a", 150)
    made.start("b", 50)
    made.on_call("b", 80, 80, 1.0)
    made.plan(1.0)
    assert made.phase("b") is Phase.PAUSED
    made.add("c")
    assert made.plan(1.0) == ()
    made.on_end("a", 2.0)
    assert made.decide(2.0) == [("Resume", "b"), ("Admit", "c")]


def test_a_group_is_probed_before_its_siblings_start(situation) -> None:
    made = situation()
    made.add("g/0", "g/1", "g/2", siblings=3)
    assert made.decide(0.0) == [("Admit", "g/0")]
    assert made.plan(1.0) == ()
    made.on_call("g/0", 100, 10, 1.0)
    assert made.decide(1.0) == [("Grant", "g/0"), ("Admit", "g/1"), ("Admit", "g/2")]


def test_the_probed_footprint_limits_the_siblings(situation) -> None:
    made = situation(budget_tokens=300, share_group_prefix=False)
    made.add(*(f"g/{k}" for k in range(4)), siblings=4)
    made.plan(0.0)
    made.on_call("g/0", 120, 10, 1.0)
    assert made.decide(1.0) == [("Grant", "g/0"), ("Admit", "g/1")]


def test_a_shared_prefix_counts_once(situation) -> None:
    made = situation(budget_tokens=300)
    made.add(*(f"g/{k}" for k in range(4)), siblings=4)
    made.plan(0.0)
    made.on_call("g/0", 120, 10, 1.0)
    made.plan(1.0)
    for task in ("g/1", "g/2", "g/3"):
        made.on_call(task, 120, 10, 1.0)
    assert made.decide(1.0) == [("Grant", "g/1"), ("Grant", "g/2"), ("Grant", "g/3")]
    assert made.view().ranks[0].usage_tokens == 120 + 4 * 10


def test_a_late_probe_lets_the_siblings_start_on_the_prior(situation) -> None:
    made = situation(probe_timeout_s=5.0)
    made.add("g/0", "g/1", siblings=2)
    made.plan(0.0)
    assert made.next_wake_s() == 5.0
    assert made.plan(4.9) == ()
    assert made.decide(5.0) == [("Admit", "g/1")]


def test_a_probe_that_ends_or_is_withdrawn_hands_over(situation) -> None:
    made = situation()
    made.add("g/0", "g/1", "g/2", "g/3", siblings=4)
    made.withdraw("g/0")
    assert made.decide(0.0) == [("Admit", "g/1")]
    made.on_end("g/1", 1.0, completed=False)
    assert made.decide(1.0) == [("Admit", "g/2"), ("Admit", "g/3")]


def test_missing_siblings_start_before_new_groups_and_evaluation_before_both(situation) -> None:
    made = situation(max_tasks_per_rank=1)
    made.add("g/0", "g/1", siblings=2, order=5)
    made.plan(0.0)
    made.on_call("g/0", 10, 1, 0.0)
    made.plan(0.0)
    made.add("new", order=0)
    made.add("eval", kind="eval", order=9)
    started = []
    for running in ("g/0", "eval", "g/1"):
        made.on_end(running, 1.0)
        started += [decision.task for decision in made.plan(1.0)]
    assert started == ["eval", "g/1", "new"]


def crowd(made, order: int) -> None:
    """`big` fills a rank of 300; `paused` of buffer `order` waits; g/1 is missing in a group of buffer 5."""
    made.set_environment_capacity("one", 1)
    made.add("g/0", "g/1", siblings=2, order=5, environment="one")
    made.plan(0.0)
    made.on_call("g/0", 10, 10, 0.0)
    made.plan(0.0)
    made.on_turn("g/0", 20, 0.0)
    for task, key in (("big", 0), ("paused", order)):
        made.start(task, 10, order=key)
    made.on_call("big", 240, 10, 1.0)
    made.plan(1.0)
    made.on_call("paused", 200, 10, 1.0)
    assert made.decide(1.0) == [("Pause", "paused")]
    made.on_end("g/0", 2.0)


def test_a_missing_sibling_goes_before_a_paused_task_of_a_later_buffer_only(situation) -> None:
    admitted: dict[int, list[tuple[str, str]]] = {}
    for order in (4, 5, 6):
        made = situation(budget_tokens=300, max_wait_s=100.0)
        crowd(made, order)
        made.add("new", order=0)
        admitted[order] = made.decide(2.0)
        made.check()
    assert admitted == {4: [], 5: [], 6: [("Admit", "g/1")]}


def test_a_starved_task_is_overtaken_by_no_sibling(situation) -> None:
    made = situation(budget_tokens=300, max_wait_s=0.5)
    crowd(made, 6)
    made.plan(1.6)
    assert made.decide(2.0) == []


def test_environment_capacity_limits_its_own_tasks_only(situation) -> None:
    made = situation()
    made.set_environment_capacity("slow", 1)
    made.add("s1", "s2", environment="slow")
    made.add("f1", environment="fast", order=9)
    assert made.decide(0.0) == [("Admit", "s1"), ("Admit", "f1")]
    made.on_end("s1", 1.0)
    assert made.decide(1.0) == [("Admit", "s2")]
    made.set_environment_capacity("slow", None)
    made.add("s3", environment="slow")
    assert made.decide(2.0) == [("Admit", "s3")]


def test_evaluation_has_its_reserved_environment_slots(situation) -> None:
    made = situation()
    made.set_environment_capacity("env", 3, reserved_eval=1)
    made.add("t1", "t2", "t3")
    assert made.decide(0.0) == [("Admit", "t1"), ("Admit", "t2")]
    made.add("e1", "e2", kind="eval")
    assert made.decide(1.0) == [("Admit", "e1")]
    made.on_end("t1", 2.0)
    assert made.decide(2.0) == [("Admit", "e2")], "it may use the others too, and goes first"
    made.on_end("e1", 3.0)
    assert made.decide(3.0) == [("Admit", "t3")]
    with pytest.raises(SchedulerError, match="reserved_eval 4 must be between 0 and the limit 3"):
        made.set_environment_capacity("env", 3, reserved_eval=4)


def test_a_task_that_the_gateway_turned_away_is_queued_again(situation) -> None:
    made = situation()
    made.add("a", order=1)
    made.add("b", environment="other", order=2)
    made.plan(0.0)
    made.requeue("a", retry_at_s=5.0)
    assert made.plan(1.0) == ()
    assert made.next_wake_s() == 5.0
    assert made.decide(5.0) == [("Admit", "a")]


def test_task_types_are_balanced_where_asked(situation) -> None:
    orders: dict[float, list[str]] = {}
    for weight in (0.0, 0.5):
        made = situation(diversity_weight=weight)
        made.add("x1", "x2", task_type="x")
        made.add("y1", task_type="y")
        orders[weight] = [decision.task for decision in made.plan(0.0)]
    assert orders == {0.0: ["x1", "x2", "y1"], 0.5: ["x1", "y1", "x2"]}


def test_misuse_is_named_and_changes_nothing(situation) -> None:
    made = situation(max_tasks=2)
    made.add("g/0", siblings=2)
    for entry, message in (
        (TaskEntry("g/0", "g", "train", 2, "env"), "already submitted"),
        (TaskEntry("g/1", "g", "train", 3, "env"), "num_siblings is 3, its group has 2"),
        (TaskEntry("x", "x", "train", 0, "env"), "num_siblings is 0"),
    ):
        with pytest.raises(SchedulerError, match=message):
            made.submit(entry)
    made.add("b")
    with pytest.raises(SchedulerFullError, match="max_tasks is 2"):
        made.add("c")
    with pytest.raises(WrongPhaseError, match="'b' is queued; on_call needs it admitted or acting"):
        made.on_call("b", 1, 1, 0.0)
    with pytest.raises(WrongPhaseError, match="on_end"):
        made.on_end("b", 0.0)
    made.plan(0.0)
    with pytest.raises(SchedulerError, match="max_new_tokens 0"):
        made.on_call("b", 1, 0, 0.0)
    with pytest.raises(WrongPhaseError, match="on_turn"):
        made.on_turn("b", 5, 0.0)
    with pytest.raises(UnknownRankError, match="present: w:0"):
        made.remove_rank(OTHER)
    made.check()


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="max_tasks_per_rank: ctb = off needs a concurrency"):
        CtbSettings(ctb="off")
    with pytest.raises(ValueError, match="growth_factor"):
        CtbSettings.model_validate({"growth_factor": 0.3})
    for name, info in CtbSettings.model_fields.items():
        assert info.description, name
    assert CtbSettings(budget_fraction=0.5).budget_tokens(5088) == 2544


def test_a_head_that_does_not_fit_is_not_overtaken_until_it_is_withdrawn(situation) -> None:
    made = situation(budget_tokens=300, share_group_prefix=False)
    made.add("g/0", "g/1", siblings=2)
    made.plan(0.0)
    made.on_call("g/0", 200, 10, 0.0)
    made.plan(0.0)
    made.add("small", environment="other")
    assert made.decide(1.0) == []
    made.withdraw("g/1")
    assert made.decide(1.0) == [("Admit", "small")]


def test_siblings_start_on_the_rank_of_their_group(situation) -> None:
    made = situation(num_ranks=3)
    for group in ("f", "g", "h"):
        made.add(*(f"{group}/{k}" for k in range(3)), siblings=3)
    homes = {decision.task[0]: decision.rank for decision in made.plan(0.0)}
    assert len(set(homes.values())) == 3
    for group in homes:
        made.on_call(f"{group}/0", 100, 10, 0.0)
    admits = [decision for decision in made.plan(0.0) if isinstance(decision, Admit)]
    assert len(admits) == 6
    assert all(decision.rank == homes[decision.task[0]] for decision in admits)
