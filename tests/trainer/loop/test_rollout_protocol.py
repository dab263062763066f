"""Redundancy, filtering, Stuck aborts and re-sampling in the rollout, with every prompt accounted for."""

from __future__ import annotations

import asyncio

import pytest
from loop_fakes import ScriptedRunner, trajectory

from tide_trainer.errors import RunFailed
from tide_trainer.loop.prompts import PromptSource
from tide_trainer.loop.rollout import Rollout
from tide_trainer.persistence.resume import read_run


class Facts:
    """Pauses and episodes as the test says."""

    def __init__(self) -> None:
        self.paused: dict[str, float] = {}
        self.episode: float | None = None

    def paused_s(self, group: str) -> float:
        return self.paused.get(group, 0.0)

    def episode_s(self, environment: str) -> float | None:
        assert environment == "toy"
        return self.episode


class Bench:
    """A rollout with a manual clock."""

    def __init__(self, settings, repository, script, **algorithm) -> None:
        self.now_s = 0.0
        self.facts = Facts()
        self.repository = repository
        self.runner = ScriptedRunner(script)
        self.algorithm = settings.algorithm.model_copy(update=algorithm)
        self.source = PromptSource(settings.tasks)
        self.rollout = Rollout(
            self.runner, self.source, repository, self.algorithm, settings.agent,
            facts=self.facts, now=lambda: self.now_s,
        )  # fmt: skip

    async def until(self, seen) -> None:
        async with asyncio.timeout(10):
            while not seen():  # noqa: ASYNC110 - what is waited for is in the rollout
                await asyncio.sleep(0.001)

    def samplings(self, uid: str) -> set[int]:
        return {attempt for group, _, attempt in self.runner.started if group == uid}

    async def step(self) -> tuple[int, list]:
        version, groups = await asyncio.wait_for(self.rollout.next_batch(), 10)
        await self.repository.add_train_step([group.uid for group in groups], version, {}, 1.0)
        self.rollout.set_version(version + 1)
        return version, groups

    async def end(self) -> dict[str, int]:
        """Closes; the account has each prompt once, and no place is left."""
        await self.rollout.close()
        await self.repository.drop_unfinished("the run ended first")
        account = await self.repository.account()
        assert sum(account.values()) == self.source.position
        stored = await read_run(self.repository.engine, self.repository.run)
        assert stored is not None
        assert stored.entries == ()
        assert {group.status for group in stored.groups} <= {"trained", "dropped"}
        return account


def never():
    return asyncio.get_running_loop().create_future()


def done(_prompt, group, member, _attempt):
    return trajectory(group, member, reward=float(member))


async def test_of_redundant_siblings_the_first_rewarded_count_and_the_rest_is_aborted(settings, repository):
    def script(prompt, group, member, attempt):
        return never() if member == 0 else trajectory(group, member, None if member == 1 else 1.0 * member, outcome="x")

    bench = Bench(settings, repository, script, spare_siblings=2, groups_per_batch=1, eta=0)
    bench.rollout.open()
    _, groups = await bench.step()
    assert [one.member for one in groups[0].trajectories] == [1, 2, 3]
    assert sum(one.reward is not None for one in groups[0].trajectories) == bench.algorithm.group_size
    assert bench.runner.cancelled == 1
    await bench.end()


async def test_redundant_groups_are_aborted_once_the_batch_is_whole_and_sampled_again(settings, repository):
    slow = "train/0"

    def script(prompt, group, member, attempt):
        return (
            never() if group == slow and attempt == 0 else trajectory(group, member, 1.0 * member, version=versions[0])
        )

    versions = [0]
    bench = Bench(settings, repository, script, spare_groups=1, eta=0)
    bench.rollout.open()
    _, groups = await bench.step()
    assert {group.uid for group in groups} == {"train/1", "train/2"}
    versions[0] = 1
    _, groups = await bench.step()
    assert slow in {group.uid for group in groups} | {group for group, _, _ in bench.runner.started}
    await bench.until(lambda: len(bench.samplings(slow)) == 2)
    # A later sampling goes on where the attempts of the earlier one might have ended: its keys supersede theirs.
    assert bench.samplings(slow) == {0, settings.agent.max_attempts}
    account = await bench.end()
    assert account["trained"] == 4


async def test_t4_with_nine_of_ten_groups_of_equal_rewards_training_still_progresses(settings, repository):
    version = [0]

    def script(prompt, group, member, attempt):
        equal = int(group.rpartition("/")[2]) % 10
        return trajectory(group, member, 1.0 if equal else float(member), version=version[0])

    bench = Bench(settings, repository, script, filter_equal_rewards=True)
    bench.rollout.open()
    for step in range(4):
        _, groups = await bench.step()
        assert all(len({one.reward for one in group.trajectories}) > 1 for group in groups)
        version[0] = step + 1
    account = await bench.end()
    assert account["trained"] == 8
    assert account["dropped: equal rewards"] >= 60


async def test_without_the_filter_groups_of_equal_rewards_train(settings, repository):
    bench = Bench(settings, repository, lambda p, group, member, a: trajectory(group, member, 1.0), eta=0)
    bench.rollout.open()
    assert len((await bench.step())[1]) == 2
    await bench.end()


async def stuck(settings, repository, **algorithm) -> Bench:
    """The first group of the first batch never ends at its first sampling; the trainer waits for it."""

    def script(prompt, group, member, attempt):
        if group == "train/0" and attempt == 0:
            return never()
        return trajectory(group, member, reward=float(member), version=bench.rollout.trainer_version)

    bench = Bench(settings, repository, script, eta=0, groups_per_batch=4, **algorithm)
    bench.rollout.open()
    await bench.until(lambda: bench.rollout.buffers()[0].num_occupied == 3)
    await bench.rollout.abort_overdue()
    return bench


async def test_a_group_that_a_stuck_batch_waited_for_too_long_is_sampled_again_later(settings, repository):
    bench = await stuck(settings, repository)
    bench.now_s = 59.0
    await bench.rollout.abort_overdue()
    assert bench.runner.cancelled == 0
    bench.now_s = 60.0
    await bench.rollout.abort_overdue()
    await bench.until(lambda: bench.runner.cancelled == bench.algorithm.group_size)
    stored = await read_run(repository.engine, "run")
    row = next(group for group in stored.groups if group.uid == "train/0")
    assert (row.status, row.reason, row.sampling) == ("waiting", "stuck", 1)
    # Another prompt takes its place in this batch; it is sampled again for the next one.
    _, groups = await bench.step()
    assert {group.uid for group in groups} == {"train/1", "train/2", "train/3", "train/4"}
    _, groups = await bench.step()
    assert "train/0" in {group.uid for group in groups}
    assert bench.samplings("train/0") == {0, settings.agent.max_attempts}
    account = await bench.end()
    assert account["trained"] == 8


async def test_pauses_do_not_count_and_long_episodes_raise_the_limit(settings, repository):
    bench = await stuck(settings, repository)
    bench.facts.paused["train/0"] = 100.0
    bench.now_s = 159.0
    await bench.rollout.abort_overdue()
    bench.facts.episode = 50.0
    bench.now_s = 249.0
    await bench.rollout.abort_overdue()
    assert bench.runner.cancelled == 0
    bench.now_s = 250.0
    await bench.rollout.abort_overdue()
    await bench.until(lambda: bench.runner.cancelled == 2)
    _, groups = await bench.step()
    assert len(groups) == 4
    await bench.end()


async def test_a_limit_of_zero_waits_on(settings, repository):
    bench = await stuck(settings, repository, stuck_s=0.0)
    bench.now_s = 1e6
    await bench.rollout.abort_overdue()
    assert bench.runner.cancelled == 0
    await bench.end()


async def test_a_prompt_that_is_stuck_each_time_is_dropped_with_its_reason(settings, repository):
    bench = await stuck(settings, repository, max_samplings=1)
    bench.now_s = 60.0
    await bench.rollout.abort_overdue()
    await bench.step()
    account = await bench.end()
    assert account["dropped: given up 1 times, at last as stuck"] == 1


async def test_t3_a_group_that_ages_in_a_buffer_is_never_trained_beyond_the_bound(settings, repository):
    """Complete at v0; the ranks serve v1, v2, v3, and nothing is consumed meanwhile."""
    bench = Bench(settings, repository, done)
    bench.rollout.open()
    await bench.until(lambda: sum(view.num_occupied for view in bench.rollout.buffers()) == 4)
    for version in (1, 2, 3):
        bench.rollout.set_version(version)
    for _ in range(200):  # what was wrongly admitted would start in these rounds
        await asyncio.sleep(0)
    # The trainer's version stands: nothing newer is admitted, and what there is trains within the bound.
    assert len({group for group, _, _ in bench.runner.started}) == 4
    for expected in (0, 1):
        version, groups = await bench.rollout.next_batch()
        assert version == expected
        assert all(group.version + bench.algorithm.eta >= version for group in groups)
    await bench.end()


@pytest.mark.parametrize("eta", [0, 1])
async def test_t5_versions_mix_only_upwards_from_the_groups_own_and_not_at_eta_zero(settings, repository, eta):
    """A task that goes on after a sync samples from newer weights: allowed within the bound, and never at eta 0."""

    def script(prompt, group, member, attempt):
        first = trajectory(group, member, float(member), version=0)
        newer = trajectory(group, member, version=1).segments if member else ()
        return type(first)(**{**{n: getattr(first, n) for n in first.__slots__}, "segments": first.segments + newer})

    bench = Bench(settings, repository, script, eta=eta)
    bench.rollout.open()
    if eta:
        _, groups = await bench.step()
        assert all(group.version == 0 for group in groups)
    else:
        with pytest.raises(RunFailed, match="holds tokens of version 1, though eta is 0"):
            await bench.step()
    await bench.rollout.close()
