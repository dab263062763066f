"""Which rank keeps a version for which evaluation, and what becomes of evaluations that find none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from loop_fakes import ScriptedRunner, trajectory

from tide_trainer.errors import RunFailed
from tide_trainer.loop.anchors import AnchoredEvaluations
from tide_trainer.loop.prompts import held_out
from tide_trainer.loop.rank_versions import RankVersions
from tide_trainer.types import RankId

FIRST, SECOND, THIRD = (RankId("rollout", index) for index in range(3))


class Joiner:
    """Notes who joins, and has the rank serve the newest version."""

    def __init__(self, ranks):
        self.ranks, self.joined, self.failure = ranks, [], None

    async def join(self, rank):
        if self.failure:
            raise self.failure
        self.joined.append(rank)
        self.ranks.served(self.ranks.newest, {rank})


@pytest.fixture
def world(settings):
    """Evaluations of four tasks whose ends the test gives, on ranks at version 0."""

    def build(num_ranks=2, **evaluation):
        tasks, ends, records, failures = {}, {}, [], []
        ranks = RankVersions(tasks)
        for rank in (FIRST, SECOND, THIRD)[:num_ranks]:
            ranks.add(rank, 0)

        def script(_prompt, group, member, _attempt):
            return ends.setdefault((group, member), asyncio.get_running_loop().create_future())

        runner, joiner = ScriptedRunner(script), Joiner(ranks)
        timing = settings.evaluation.model_copy(update={"grace_s": 0.01} | evaluation)
        evaluations = AnchoredEvaluations(
            *(runner, ranks, joiner, lambda result, label: records.append((result, label)), failures.append, timing, 1)
        )

        def start(version, greedy=False):
            evaluations.start(held_out(settings.tasks), version, greedy=greedy, label=f"label {version}")

        def end(version, kind="sampled", members=range(4), of=None):
            group = f"eval/{version}/{kind}"
            for member in members:
                made = trajectory(group, member, float(member), version if of is None else of)
                ends[group, member].set_result(made)

        def place(version, *on):
            for number, rank in enumerate(on):
                tasks[f"{version}/{number}"] = SimpleNamespace(
                    session=f"{version}/{number}", version=version, rank=rank
                )

        async def sync(version):
            """What the weight sync does with `spare`; returns the ranks that it left."""
            kept = await evaluations.spare()
            ranks.check_closing(ranks.living() - kept)
            ranks.served(version, ranks.living() - kept)
            return kept

        return SimpleNamespace(
            **{name: value for name, value in locals().items() if name not in {"timing", "runner", "script"}}
        )

    return build


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


async def test_the_rank_with_most_of_the_tasks_keeps_the_version_and_joins_when_they_have_ended(world):
    world = world(num_ranks=3)
    world.start(0)
    world.start(0, greedy=True)
    world.place(0, FIRST, SECOND, SECOND)
    await settle()
    assert await world.sync(1) == {SECOND}
    assert (world.ranks.of(SECOND), world.ranks.newest) == (0, 1)
    world.end(0)
    await settle()
    assert world.joiner.joined == [], "the greedy evaluation of the version still runs"
    # It outlives a second sync on the same rank, wherever its tasks say that they were last.
    world.place(0, FIRST, FIRST, FIRST)
    assert await world.sync(2) == {SECOND}
    world.end(0, "greedy")
    await settle()
    assert world.joiner.joined == [SECOND]
    assert await world.sync(3) == frozenset()
    assert [(r.kind, r.model_version, r.num, r.partial, r.kept_rank, label) for r, label in world.records] == [
        ("sampled", 0, 4, False, "rollout:1", "label 0"),
        ("greedy", 0, 4, False, "rollout:1", "label 0"),
    ]


async def test_without_a_rank_to_spare_the_sync_waits_the_grace_and_tags_the_rest_partial(world):
    world = world(num_ranks=1)
    world.start(0)
    await settle()
    world.end(0, members=[1, 2])
    assert await world.sync(1) == frozenset()
    ((result, _),) = world.records
    assert (result.num, result.num_total, result.partial, result.model_version) == (2, 4, True, 0)
    assert world.joiner.joined == []


async def test_a_sync_waits_no_longer_than_the_last_task(world):
    world = world(num_ranks=1, grace_s=1000)
    world.start(0)
    await settle()
    syncing = asyncio.create_task(world.sync(1))
    await settle()
    assert not syncing.done()
    world.end(0)
    assert await asyncio.wait_for(syncing, 5) == frozenset()
    assert not world.records[0][0].partial


async def test_of_two_evaluations_at_once_the_older_gives_way_where_one_rank_can_be_spared(world):
    for num_ranks, left in ((2, {SECOND}), (3, {FIRST, SECOND})):
        made = world(num_ranks=num_ranks)
        made.start(0)
        made.place(0, FIRST)
        await settle()
        assert await made.sync(1) == {FIRST}
        made.start(1)
        made.place(1, SECOND)
        await settle()
        if num_ranks == 2:
            made.tasks.pop("0/0")  # as its abortion does
        assert await made.sync(2) == left
        assert [result.partial for result, _ in made.records] == [True] * (num_ranks == 2)
        assert made.joiner.joined == [], "the sync itself took the older one's rank along"
        made.end(1)
        await settle()
        assert made.joiner.joined == [SECOND]
        await made.evaluations.close()


async def test_r4_when_the_kept_rank_dies_its_evaluation_is_over_without_a_wait_and_partial(world):
    world = world(num_ranks=2, grace_s=1000)
    world.start(0)
    await settle()
    assert await world.sync(1) == {FIRST}
    world.end(0, members=[3])
    world.ranks.remove(FIRST)
    assert await asyncio.wait_for(world.sync(2), 5) == frozenset()
    ((result, _),) = world.records
    assert (result.num, result.num_total, result.kept_rank) == (1, 4, "rollout:0")


async def test_an_evaluation_has_its_own_deadline_after_which_its_rank_joins(world):
    world = world(timeout_s=0.05)
    world.start(0)
    await settle()
    assert await world.sync(1) == {FIRST}
    await asyncio.wait_for(world.evaluations.finish(), 5)
    assert world.joiner.joined == [FIRST]
    assert world.records[0][0].partial


async def test_a_join_that_fails_the_run_is_told(world):
    world = world()
    world.joiner.failure = RunFailed("below min_ranks")
    world.start(0)
    await settle()
    await world.sync(1)
    world.end(0)
    await settle()
    assert world.failures == [world.joiner.failure]


async def test_r8_a_task_of_another_version_does_not_count_and_is_loud(world, caplog):
    world = world()
    world.start(0)
    await settle()
    world.end(0, members=[0, 1])
    world.end(0, members=[2, 3], of=1)
    await settle()
    ((result, _),) = world.records
    assert (result.num, result.num_mixed, result.num_total, result.partial) == (2, 2, 4, True)
    assert result.model_version == 0
    assert caplog.text.count("was sampled at versions [1] and does not count") == 2


async def test_a_sync_that_would_strand_an_evaluation_is_refused(world):
    world = world(num_ranks=2)
    world.place(0, FIRST)
    world.ranks.check_closing({FIRST})
    with pytest.raises(RunFailed, match="would lose its last rank"):
        world.ranks.check_closing({FIRST, SECOND})


async def test_t6_evaluations_cut_off_at_any_await_leave_nothing_behind(world):
    for num_awaits in range(12):
        made = world(num_ranks=1)
        made.start(0)
        syncing = asyncio.create_task(made.sync(1))
        for _ in range(num_awaits):
            await asyncio.sleep(0)
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)
        # The loop lives: the next sync is as any other.
        assert await asyncio.wait_for(made.sync(2), 5) == frozenset()
        assert made.ranks.of(FIRST) == 2
        await made.evaluations.close()
        assert made.failures == []
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("eval")]
