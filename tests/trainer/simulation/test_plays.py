"""Whole plays: tokens are conserved, no rate is above the roofline, every play ends, the same seed does the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.simulation import policies
from tide_trainer.simulation.rank import RankModel
from tide_trainer.simulation.run import Play, StandstillError
from tide_trainer.simulation.workload import PRESETS, WEBSHOP, make_workload

NAMES = (
    "ctb",
    "fixed 64",
    "fixed 4",
    "aimd",
    "aimd without pauses",
    "algorithm 1",
    "algorithm 1, shared prefix",
    "algorithm 1, paused first",
)


def scripted(tasks) -> tuple[int, int]:
    """Generated tokens and prompt tokens that the tasks come to, whoever schedules them."""
    generated = prompted = 0
    for task in tasks:
        prompt = task.prompt_tokens
        for turn in task.turns:
            prompted, generated = prompted + prompt, generated + turn.output_tokens
            prompt += turn.output_tokens + (turn.observation_tokens or 0)
    return generated, prompted


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_conserved_and_every_task_ends(play, make_tasks, every_policy, name: str, num_ranks: int) -> None:
    tasks = make_tasks(seed=3)
    figures = play(tasks, every_policy[name], num_ranks=num_ranks)
    assert (figures.num_generated_tokens, figures.num_prompt_tokens) == scripted(tasks)
    assert figures.num_calls == sum(len(task.turns) for task in tasks)
    computed_once = figures.num_prefilled_tokens - figures.num_recomputed_tokens
    not_cached = figures.num_prompt_tokens - figures.num_cached_tokens
    # What is preempted before its prompt is complete may find more of it in the cache the second time.
    assert computed_once == not_cached if figures.num_preemptions == 0 else computed_once <= not_cached
    assert figures.num_refused == 0


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_beats_the_perfect_cache_or_the_roofline(play, make_tasks, every_policy, name: str) -> None:
    tasks = make_tasks(seed=1, environment_s=0.01)
    model = RankModel(kv_tokens=4000, max_batched_tokens=256, max_num_seqs=32)
    figures = play(tasks, every_policy[name], model)
    assert figures.hit_rate <= figures.ideal_hit_rate
    assert figures.generated_tokens_per_s <= model.roofline_tokens_per_s(model.max_num_seqs, 0)
    least_s = figures.num_ideal_prefilled_tokens * model.kp
    assert figures.time_s > least_s
    longest_s = max(
        task.reset_s + sum(turn.environment_s + turn.output_tokens * model.step_s(1, 0) for turn in task.turns)
        for task in tasks
    )
    assert figures.time_s > longest_s


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_figures(play, make_tasks, every_policy, name: str) -> None:
    assert play(make_tasks(5), every_policy[name]) == play(make_tasks(5), every_policy[name])
    assert play(make_tasks(5), every_policy[name]) != play(make_tasks(6), every_policy[name])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(NAMES),
    kv_tokens=st.integers(400, 8000),
    num_ranks=st.integers(1, 3),
    max_num_seqs=st.integers(1, 40),
    max_batched_tokens=st.integers(40, 400),
    environment_s=st.sampled_from([0.01, 0.5, 5.0]),
)
def test_every_play_ends_whatever_the_engine(seed, name, kv_tokens, num_ranks, environment_s, **engine) -> None:
    shape = replace(WEBSHOP, prompt_tokens=100, common_tokens=40, observation_tokens=60.0, output_tokens=12.0)
    shape = replace(shape, max_new_tokens=40, context_tokens=800, environment_s=environment_s, turns=4.0, min_turns=1)
    tasks = make_workload(shape, random.Random(seed), train=(3, 4), evaluation=(3, 2))
    one = Play(tasks, _policies()[name], RankModel(kv_tokens=kv_tokens, **engine), num_ranks)
    figures = one.run()
    assert figures.num_tasks == len(tasks)
    for rank in one.ranks.values():
        rank.cache.check()
        assert rank.num_running == rank.num_waiting == rank.cache.num_used == 0
    computed_once = figures.num_prefilled_tokens - figures.num_recomputed_tokens
    not_cached = figures.num_prompt_tokens - figures.num_cached_tokens
    # What is preempted before its prompt is complete may find more of it in the cache the second time.
    assert computed_once == not_cached if figures.num_preemptions == 0 else computed_once <= not_cached
    if figures.num_refused == 0:
        assert figures.num_generated_tokens == scripted(tasks)[0]


def _policies():
    make = policies
    return dict(
        zip(
            NAMES,
            (
                make.ctb(),
                make.fixed(64),
                make.fixed(4),
                make.aimd(make.AimdSettings(start=2, increase=1)),
                make.aimd(make.AimdSettings(start=2, increase=1, pauses=False)),
                make.algorithm_one(),
                make.algorithm_one(make.AlgorithmOneSettings(share_group_prefix=True)),
                make.algorithm_one(make.AlgorithmOneSettings(new_while_paused=False)),
            ),
            strict=True,
        )
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_task_larger_than_the_cache_is_refused_and_the_others_end(play, make_tasks, every_policy, name) -> None:
    small, large = make_tasks(0, (2, 2), (0, 1)), make_tasks(1, (1, 1), (0, 1), prompt_tokens=4100)
    tasks = (*small, replace(large[0], entry=replace(large[0].entry, task="large", group="large")))
    figures = play(tasks, every_policy[name])
    assert figures.num_refused == 1
    assert figures.num_generated_tokens == scripted(small)[0]


def test_a_policy_that_leaves_tasks_waiting_is_told(make_tasks) -> None:
    class Idle:
        """Starts nothing."""

        def submit(self, entry) -> None:
            pass

        def plan(self, now_s: float) -> tuple[()]:
            return ()

        def next_wake_s(self) -> None:
            return None

    with pytest.raises(StandstillError, match="36 of 36 tasks are open"):
        Play(make_tasks(), lambda *_: Idle()).run()


def test_too_many_tasks_for_the_cache_thrash_it_and_few_do_not(play, make_tasks) -> None:
    tasks = make_tasks(0, (20, 4), (0, 1), turns=8.0)
    many, few = play(tasks, policies.fixed(64)), play(tasks, policies.fixed(6))
    assert many.hit_rate < 0.6 * few.hit_rate
    assert few.hit_rate > 0.9 * few.ideal_hit_rate
    assert many.num_prefilled_tokens > 3 * few.num_prefilled_tokens
    assert many.num_preemptions > few.num_preemptions == 0


def test_budgets_keep_the_cache_useful_without_a_number_to_choose(play, make_tasks) -> None:
    tasks = make_tasks(0, (20, 4), (0, 1), turns=8.0)
    prior = {"webshop": {"prompt_tokens": 100, "final_tokens": 400}}
    figures = play(tasks, policies.ctb(CtbSettings.model_validate({"priors": prior})))
    assert figures.hit_rate > 0.8 * figures.ideal_hit_rate
    assert figures.num_preemptions == 0


def test_the_presets_look_as_they_should() -> None:
    tasks = make_workload(PRESETS["A"], random.Random(0))
    assert len(tasks) == 32 * 8 + 200 * 4
    assert len({task.entry.task for task in tasks}) == len(tasks)
    turns = [len(task.turns) for task in tasks]
    assert 7.0 < sum(turns) / len(turns) < 8.5
    assert min(turns) >= 1
    assert max(turns) <= 20
    generated, _ = scripted(tasks)
    assert 75 < generated / sum(turns) < 82
    finals = [
        task.prompt_tokens + sum(turn.output_tokens + (turn.observation_tokens or 0) for turn in task.turns)
        for task in tasks
    ]
    assert 3100 < sum(finals) / len(finals) < 3800
    assert max(finals) <= 8192
    failed = sum(not task.completed for task in tasks)
    assert 0.002 < failed / sum(turns) < 0.009
