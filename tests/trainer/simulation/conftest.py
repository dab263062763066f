"""Small workloads and engines, and plays of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tide_trainer.simulation import policies
from tide_trainer.simulation.figures import Figures
from tide_trainer.simulation.policies import PolicyFactory
from tide_trainer.simulation.rank import RankModel
from tide_trainer.simulation.run import Play
from tide_trainer.simulation.workload import WEBSHOP, TaskScript, make_workload

SHAPE = replace(WEBSHOP, prompt_tokens=100, common_tokens=40, observation_tokens=40.0, output_tokens=12.0)
SHAPE = replace(SHAPE, max_new_tokens=40, context_tokens=800, environment_s=0.5, turns=5.0, min_turns=1, max_turns=10)


@pytest.fixture
def make_tasks() -> Callable[..., tuple[TaskScript, ...]]:
    """Draws a small workload; `changes` are fields of its shape."""

    def make(
        seed: int = 0, train: tuple[int, int] = (6, 4), evaluation: tuple[int, int] = (6, 2), **changes
    ) -> tuple[TaskScript, ...]:
        return make_workload(replace(SHAPE, **changes), random.Random(seed), train=train, evaluation=evaluation)

    return make


@pytest.fixture
def small_engine() -> RankModel:
    """250 blocks: about ten tasks of the small workload at their longest."""
    return RankModel(kv_tokens=4000, max_batched_tokens=256, max_num_seqs=32)


@pytest.fixture
def every_policy() -> dict[str, PolicyFactory]:
    """All policies that are compared, at the size of the small engine."""
    return {
        "ctb": policies.ctb(),
        "fixed 64": policies.fixed(64),
        "fixed 4": policies.fixed(4),
        "aimd": policies.aimd(policies.AimdSettings(start=2, increase=1)),
        "aimd without pauses": policies.aimd(policies.AimdSettings(start=2, increase=1, pauses=False)),
        "algorithm 1": policies.algorithm_one(),
        "algorithm 1, shared prefix": policies.algorithm_one(policies.AlgorithmOneSettings(share_group_prefix=True)),
        "algorithm 1, paused first": policies.algorithm_one(policies.AlgorithmOneSettings(new_while_paused=False)),
    }


@pytest.fixture
def play(small_engine: RankModel) -> Callable[..., Figures]:
    """Plays a workload and checks the caches at the end."""

    def run(
        tasks: Sequence[TaskScript], factory: PolicyFactory, model: RankModel | None = None, num_ranks: int = 1
    ) -> Figures:
        one = Play(tasks, factory, model or small_engine, num_ranks)
        figures = one.run()
        for rank in one.ranks.values():
            rank.cache.check()
            assert rank.num_running == rank.num_waiting == rank.cache.num_used == 0
        return figures

    return run
