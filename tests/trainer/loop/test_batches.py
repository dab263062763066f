from __future__ import annotations

import dataclasses

import pytest
from loop_fakes import trajectory

from tide_trainer.errors import RunFailed
from tide_trainer.loop.batches import batch_figures, success_rate, train_batch
from tide_trainer.loop.prompts import PromptSource, demonstrations, held_out
from tide_trainer.objectives import AdvantageSettings
from tide_trainer.settings import TrainSettings
from tide_trainer.settings_play import TaskSettings
from tide_trainer.types import Group, ImageSpan


def group(prompt, rewards, version=0):
    trajectories = tuple(
        trajectory("train/0", member, reward, outcome="completed" if reward is not None else "agent_error")
        for member, reward in enumerate(rewards)
    )
    return Group("train/0", prompt, trajectories, version)


def test_each_sequence_carries_its_trajectorys_advantage_and_the_engines_ids(prompt):
    batch = train_batch([group(prompt, [1.0, 0.0])], AdvantageSettings())
    assert [round(sequence.advantage, 4) for sequence in batch.sequences] == [0.7071, -0.7071]
    assert batch.sequences[0].token_ids == (5, 6, 7, 8)
    assert batch.sequences[0].logprobs == (0.0, 0.0, -0.5, -0.25)
    assert batch.sequences[0].sampled == (False, False, True, True)


def test_a_trajectory_without_a_reward_neither_trains_nor_counts_in_its_group(prompt):
    batch = train_batch([group(prompt, [1.0, None, 0.0])], AdvantageSettings())
    assert [round(sequence.advantage, 4) for sequence in batch.sequences] == [0.7071, -0.7071]


def with_image(group, span):
    members = [
        dataclasses.replace(one, segments=tuple(dataclasses.replace(s, images=(span,)) for s in one.segments))
        for one in group.trajectories
    ]
    return dataclasses.replace(group, trajectories=tuple(members))


def test_images_go_with_their_sequence_and_must_fit_its_ids(prompt):
    span = ImageSpan(1, 1, "a" * 64)
    seen = with_image(group(prompt, [1.0, 0.0]), span)
    # 6 is the placeholder: the ids are 5, 6, 7, 8.
    batch = train_batch([seen], AdvantageSettings(), placeholder_id=6)
    assert [sequence.images for sequence in batch.sequences] == [(span,), (span,)]
    for wrong, placeholder_id, told in [
        (seen, None, "takes no images"),
        (seen, 7, "segment 0 of trajectory"),
        (with_image(seen, ImageSpan(1, 2, "a" * 64)), 6, "1 placeholder ids stand there"),
        (group(prompt, [1.0, 0.0]), 6, "belongs to no image"),
    ]:
        with pytest.raises(RunFailed, match=told):
            train_batch([wrong], AdvantageSettings(), placeholder_id=placeholder_id)


def test_figures_of_a_batch(prompt):
    figures = batch_figures([group(prompt, [1.0, None, 0.0], version=2), group(prompt, [0.5, 0.5], version=3)], 3)
    assert figures.mean_reward == pytest.approx(0.5)
    assert figures.success == pytest.approx(0.75)
    assert (figures.staleness_mean, figures.staleness_max) == (0.5, 1)
    assert figures.num_sampled_tokens == 10


def test_figures_of_nothing_are_zeros():
    figures = batch_figures([], 0)
    assert (figures.mean_reward, figures.success, figures.staleness_max) == (0.0, 0.0, 0)
    assert success_rate([]) == 0.0


def test_no_prompt_is_handed_out_twice_and_no_split_shares_a_seed():
    tasks = TaskSettings(environment="toy", parameters={"level": 1})
    source = PromptSource(tasks)
    train = [source.take().prompt for _ in range(300)]
    tests, demos = held_out(tasks), demonstrations(tasks, 300)
    assert len({prompt.uid for prompt in (*train, *tests, *demos)}) == 800
    seeds = [{prompt.seed for prompt in part} for part in (train, tests, demos)]
    assert len(set.union(*seeds)) == 800
    assert demos[0].task == {"level": 1, "expert": True}
    assert train[0].task == {"level": 1}


def test_a_source_goes_on_where_an_earlier_one_stopped():
    tasks = TaskSettings(environment="toy")
    first = PromptSource(tasks)
    taken = [first.take().prompt for _ in range(3)]
    assert PromptSource(tasks, first.position).take().prompt.seed == taken[-1].seed + 1


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_its_last_share():
    settings = TrainSettings(learning_rate=1.0, warmup_train_steps=4)
    assert [settings.learning_rate_at(step, 6) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    falling = TrainSettings(learning_rate=1.0, warmup_train_steps=2, final_fraction=0.2)
    rates = [falling.learning_rate_at(step, 6) for step in range(7)]
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert TrainSettings(learning_rate=1.0).learning_rate_at(0, 1) == 1.0
