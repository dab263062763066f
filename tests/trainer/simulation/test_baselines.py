"""The baselines decide what their papers say."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Decision, TaskEntry
from tide_trainer.simulation import policies
from tide_trainer.simulation.aimd import AimdPolicy, AimdSettings
from tide_trainer.simulation.algorithm_one import AlgorithmOneSettings
from tide_trainer.simulation.policies import Observer, rank_ids

RANK = rank_ids(1)[0]


def entries(num_tasks: int, kind="train", group: str = "g") -> list[TaskEntry]:
    return [TaskEntry(f"{group}{index}", group, kind, num_tasks, "env", order_key=index) for index in range(num_tasks)]


def told(decisions: tuple[Decision, ...]) -> list[tuple[str, str]]:
    return [(type(decision).__name__, decision.task) for decision in decisions]


def turn(policy, task: str, prompt_tokens: int, now_s: float = 0.0) -> list[tuple[str, str]]:
    policy.on_call(task, prompt_tokens, 10, now_s)
    return told(policy.plan(now_s))


@pytest.fixture
def aimd() -> AimdPolicy:
    policy = policies.aimd(AimdSettings(start=2, increase=1, decrease=0.5, slow_start=True))(1000, 16, 1)
    assert isinstance(policy, AimdPolicy)
    for entry in entries(40):
        policy.submit(entry)
    policy.plan(0.0)
    return policy


def test_the_products_scheduler_stands_behind_the_same_calls() -> None:
    assert isinstance(policies.ctb()(1000, 16, 2), TaskScheduler)
    assert isinstance(policies.fixed(3)(1000, 16, 2), TaskScheduler)
    assert not isinstance(policies.ctb()(1000, 16, 1), Observer)
    assert isinstance(policies.aimd()(1000, 16, 1), Observer)


def test_aimd_doubles_until_congestion_then_halves_and_adds_one(aimd: AimdPolicy) -> None:
    limits = []
    for now_s, usage in enumerate([0.1, 0.3, 0.5, 0.95, 0.95, 0.5, 0.5], start=1):
        aimd.observe(usage, 0, float(now_s))
        aimd.plan(float(now_s))
        limits.append(aimd.limit(RANK))
    # 16 are congested once; the second look is within the time in which a decrease takes effect.
    assert limits == [4, 8, 16, 8, 8, 9, 10]


def test_aimd_takes_a_preemption_for_congestion(aimd: AimdPolicy) -> None:
    aimd.observe(0.1, 1, 1.0)
    assert aimd.limit(RANK) == 1


def test_aimd_does_not_raise_a_limit_that_nobody_reaches() -> None:
    policy = policies.aimd(AimdSettings(start=4))(1000, 16, 1)
    for entry in entries(3):
        policy.submit(entry)
    policy.plan(0.0)
    policy.observe(0.1, 0, 1.0)
    assert policy.limit(RANK) == 4


def test_aimd_pauses_at_the_next_call_and_resumes_before_it_starts_new_ones(aimd: AimdPolicy) -> None:
    aimd.observe(1.0, 0, 1.0)
    assert turn(aimd, "g0", 50) == [("Pause", "g0")]
    assert turn(aimd, "g1", 50) == [("Grant", "g1")]
    aimd.on_turn("g1", 60, 2.0)
    aimd.on_end("g1", 2.0)
    assert told(aimd.plan(2.0)) == [("Resume", "g0")]


def test_algorithm_one_pauses_the_shortest_context_that_does_not_execute() -> None:
    policy = policies.algorithm_one(AlgorithmOneSettings(budget_fraction=0.9, probe=False, prior_tokens=16))(1000, 1, 1)
    for entry in entries(3):
        policy.submit(entry)
    assert told(policy.plan(0.0)) == [("Admit", "g0"), ("Admit", "g1"), ("Admit", "g2")]
    for task, tokens in (("g0", 300), ("g1", 200), ("g2", 350)):
        assert turn(policy, task, tokens) == [("Grant", task)]
        policy.on_turn(task, tokens, 0.0)
    # 850 of 900 are used; g0 grows by 100, and g1 is the shortest of those that act.
    assert turn(policy, "g0", 400) == [("Grant", "g0")]
    assert turn(policy, "g1", 260) == [("Pause", "g1")]
    policy.on_turn("g0", 410, 1.0)
    policy.on_end("g0", 1.0)
    assert told(policy.plan(1.0)) == [("Resume", "g1")]


def test_algorithm_one_does_not_look_ahead_and_so_admits_by_the_present_footprint() -> None:
    policy = policies.algorithm_one(AlgorithmOneSettings(budget_fraction=0.92))(1000, 1, 1)
    for entry in entries(20):
        policy.submit(entry)
    assert told(policy.plan(0.0)) == [("Admit", "g0")], "the group's probe goes first"
    admitted = [task for what, task in turn(policy, "g0", 100) if what == "Admit"]
    assert len(admitted) == 8, "920 tokens hold nine first prompts of 100"


def test_algorithm_one_pauses_no_evaluation_while_a_train_task_is_there() -> None:
    policy = policies.algorithm_one(AlgorithmOneSettings(budget_fraction=0.5, probe=False, prior_tokens=10))(1000, 1, 1)
    for entry in (*entries(1, "eval", "e"), *entries(1, "train", "t")):
        policy.submit(entry)
    policy.plan(0.0)
    assert turn(policy, "e0", 100) == [("Grant", "e0")]
    assert turn(policy, "t0", 450) == [("Pause", "t0")]
