from __future__ import annotations

import asyncio

import pytest
from loop_fakes import ScriptedRunner, trajectory

from tide_trainer.errors import RunFailed
from tide_trainer.loop.prompts import PromptSource
from tide_trainer.loop.rollout import MAX_DROPPED_IN_A_ROW, Rollout


def make(settings, repository, script):
    runner = ScriptedRunner(script)
    rollout = Rollout(runner, PromptSource(settings.tasks), repository, settings.algorithm, settings.agent)
    return rollout, runner


def done(_prompt, group, member, _attempt):
    return trajectory(group, member, reward=float(member))


async def settle():
    for _ in range(200):
        await asyncio.sleep(0.001)


async def test_a_batch_is_the_first_groups_and_every_member_is_there(settings, repository):
    rollout, _ = make(settings, repository, done)
    rollout.open()
    version, groups = await asyncio.wait_for(rollout.next_batch(), 5)
    assert version == 0
    assert len(groups) == 2
    assert {len(group.trajectories) for group in groups} == {2}
    await rollout.close()


async def test_it_stops_at_the_staleness_bound_until_the_rollout_version_moves(settings, repository):
    rollout, runner = make(settings, repository, done)
    rollout.open()
    await settle()
    # eta 1: the buffers of versions 0 and 1 are full, version 0's rollout may fill no other.
    assert len({group for group, _, _ in runner.started}) == 4
    await rollout.next_batch()
    await settle()
    assert len({group for group, _, _ in runner.started}) == 4
    rollout.set_version(1)
    await settle()
    assert len({group for group, _, _ in runner.started}) == 6
    await rollout.close()


async def test_an_attempt_is_ordered_by_the_buffer_that_its_group_is_in_when_it_begins(settings, repository):
    waiting = []

    def script(_prompt, group, member, attempt):
        if attempt:
            return trajectory(group, member, reward=float(member))
        waiting.append((group, asyncio.get_running_loop().create_future()))
        return waiting[-1][1]

    rollout, runner = make(settings, repository, script)
    rollout.open()
    await settle()
    buffers = {group: key for (group, _, _), key in zip(runner.started, runner.order_keys, strict=True)}
    assert sorted(buffers.values()) == [0, 0, 1, 1], "eta 1 and two groups a batch"
    # A complete group of buffer 1 takes the earliest place, in buffer 0: the reservation there moves to buffer 1.
    complete = next(group for group, key in buffers.items() if key == 1)
    for member, call in enumerate(call for group, call in waiting if group == complete):
        call.set_result(trajectory(complete, member, reward=float(member)))
    await settle()
    num_before = len(runner.started)
    for group, call in list(waiting):
        if not call.done() and group in buffers:
            call.set_result(trajectory(group, 0, reward=None, outcome="infrastructure"))
    await settle()
    again = {
        group: key
        for (group, _, attempt), key in list(zip(runner.started, runner.order_keys, strict=True))[num_before:]
        if attempt
    }
    assert len(again) == 3
    assert sorted(again.values()) == [0, 1, 1], "the group that moved goes with its new buffer"
    await rollout.close()


async def test_consumed_groups_keep_the_staleness_bound(settings, repository):
    current = {"version": 0}
    rollout, _ = make(
        settings, repository, lambda p, group, member, a: trajectory(group, member, version=current["version"])
    )
    rollout.open()
    for _ in range(5):
        version, groups = await asyncio.wait_for(rollout.next_batch(), 5)
        assert all(group.version + settings.algorithm.eta >= version for group in groups)
        current["version"] = version + 1
        rollout.set_version(version + 1)
    await rollout.close()


async def test_an_infrastructure_failure_is_tried_again_and_the_agents_own_is_not(settings, repository):
    def script(_prompt, group, member, attempt):
        if member == 0:
            return trajectory(group, member, None if attempt < 2 else 1.0, outcome="infrastructure")
        return trajectory(group, member, None if group == "train/0" else 1.0, outcome="agent_error")

    rollout, runner = make(settings, repository, script)
    rollout.open()
    await asyncio.wait_for(rollout.next_batch(), 5)
    await settle()
    await rollout.close()
    attempts = [attempt for group, member, attempt in runner.started if (group, member) == ("train/0", 0)]
    assert attempts == [0, 1, 2]
    assert [a for g, m, a in runner.started if (g, m) == ("train/0", 1)] == [0]
    account = await repository.account()
    assert account["dropped: too few rewarded siblings (agent_error)"] == 1


async def test_a_failed_sibling_neither_gets_reward_zero_nor_stops_its_group(settings, repository):
    settings = settings.model_copy(
        update={"algorithm": settings.algorithm.model_copy(update={"group_size": 3, "min_group_size": 2})}
    )
    rollout, _ = make(
        settings,
        repository,
        lambda p, g, m, a: trajectory(g, m, None if m == 2 else 0.5, outcome="agent_error" if m == 2 else "completed"),
    )
    rollout.open()
    _, groups = await asyncio.wait_for(rollout.next_batch(), 5)
    assert [trajectory.reward for trajectory in groups[0].trajectories] == [0.5, 0.5, None]
    await rollout.close()


async def test_a_run_that_only_drops_groups_fails_and_says_why(settings, repository):
    rollout, _ = make(settings, repository, lambda p, g, m, a: trajectory(g, m, None, outcome="agent_error"))
    rollout.open()
    with pytest.raises(RunFailed, match="agent_error"):
        await asyncio.wait_for(rollout.next_batch(), 10)
    await rollout.close()
    assert (await repository.account())["dropped: too few rewarded siblings (agent_error)"] >= MAX_DROPPED_IN_A_ROW


async def test_a_token_older_than_the_reservation_ends_the_run(settings, repository):
    rollout, _ = make(settings, repository, lambda p, g, m, a: trajectory(g, m, version=0))
    rollout.open()
    await asyncio.wait_for(rollout.next_batch(), 5)
    rollout.set_version(1)
    await settle()
    with pytest.raises(RunFailed, match="older than its reserved"):
        await asyncio.wait_for(rollout.next_batch(), 5)
    await rollout.close()


async def test_every_prompt_is_accounted_for_after_a_stop(settings, repository):
    never = asyncio.get_running_loop().create_future()
    rollout, runner = make(
        settings,
        repository,
        lambda p, g, m, a: done(p, g, m, a) if g in {"train/0", "train/1"} else asyncio.shield(never),
    )
    rollout.open()
    version, groups = await asyncio.wait_for(rollout.next_batch(), 5)
    await repository.add_train_step([group.uid for group in groups], version, {}, 1.0)
    await settle()
    await rollout.close()
    await repository.drop_unfinished("the run ended first")
    account = await repository.account()
    assert account.pop("trained") == 2
    assert account == {"dropped: the run ended first": len({g for g, _, _ in runner.started}) - 2}
    assert runner.cancelled > 0
    assert await repository.largest_staleness() == 0


async def test_a_rollout_that_stands_still_fails_instead_of_waiting_for_ever(settings, repository):
    agent = settings.agent.model_copy(update={"task_timeout_s": 0.02, "max_attempts": 1})
    never = asyncio.get_running_loop().create_future()
    rollout, _ = make(
        settings.model_copy(update={"agent": agent}), repository, lambda p, g, m, a: asyncio.shield(never)
    )
    rollout.open()
    with pytest.raises(RunFailed, match="no group ended"):
        await rollout.next_batch()
    await rollout.close()
