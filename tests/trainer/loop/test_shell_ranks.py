"""The shell with several ranks: gates of single ranks, versions of grants, and tasks that are anchored to one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from shell_parts import Gateway, Router, Workers

from tide_trainer.errors import RunFailed
from tide_trainer.loop.flight import CallsInFlight
from tide_trainer.loop.recorder import recorder_of
from tide_trainer.loop.shell import SchedulerShell
from tide_trainer.run_directory import RunDirectory
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.settings import FootprintPrior
from tide_trainer.types import EngineInfo, RankId

FIRST, SECOND = RankId("rollout", 0), RankId("rollout", 1)


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.fixture
async def world(settings, tmp_path, prompt):
    """Two ranks at version 0, and two evaluation tasks of version 0 that have each made a call, one on each rank."""
    log = []
    prior = FootprintPrior(prompt_tokens=10, final_tokens=20)
    ctb = settings.scheduler.model_copy(update={"probe": False, "default_prior": prior})
    whole = settings.model_copy(update={"scheduler": ctb})
    router, workers, scheduler = Router(log), Workers(log), TaskScheduler(ctb)
    recorder = recorder_of(whole, RunDirectory("run", tmp_path), scheduler, str)
    shell = SchedulerShell(scheduler, router, workers, Gateway(log), whole, "run", recorder)
    for rank in (FIRST, SECOND):
        shell.add_rank(EngineInfo(rank, "http://engine", 400, 1, 100, 0))
    made = SimpleNamespace(shell=shell, router=router, workers=workers, log=log, tasks={}, count=0)

    def call(session):
        made.count += 1
        about = {"session": session, "call": f"c{made.count}", "prompt_tokens": 10, "max_new_tokens": 5}
        router.events["call"](about)
        return f"c{made.count}"

    def turn(session, number):
        footprint = {"prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": 2, "context_tokens": 12}
        router.events["turn"]({"session": session, "call": number, "footprint": footprint})

    made.call, made.turn = call, turn
    for member in range(2):
        coroutine = shell.run(prompt, "eval/0/sampled", member, 0, "eval", version=0)
        session = f"eval.0.sampled.{member}.0"
        made.tasks[session] = asyncio.create_task(coroutine)
        await settle()
        workers.started({"session": session, "task_id": f"t{member}"})
    made.sessions = list(made.tasks)
    calls = [call(session) for session in made.sessions]
    await settle()
    assert {router.ranks[number] for number in calls} == {FIRST, SECOND}
    made.here = dict(zip(made.sessions, (router.ranks[number] for number in calls), strict=True))
    for session, number in zip(made.sessions, calls, strict=True):
        turn(session, number)
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)
    await shell.close()


async def test_calls_of_a_version_go_on_at_the_kept_rank_while_and_after_the_others_sync(world):
    assert world.shell.versions.best_keeper(0) == FIRST
    world.shell.close_gate({SECOND})
    await asyncio.wait_for(world.shell.drained({SECOND}), 2)
    during = [world.call(session) for session in world.sessions]
    await settle()
    assert [world.router.ranks[number] for number in during] == [FIRST, FIRST]
    assert world.shell.busy_ranks() == {FIRST}
    await asyncio.wait_for(world.shell.drained({SECOND}), 2)  # the kept rank's calls delay no sync
    world.shell.open_gate(1, {SECOND})
    for session, number in zip(world.sessions, during, strict=True):
        world.turn(session, number)
    after = [world.call(session) for session in world.sessions]
    await settle()
    assert [world.router.ranks[number] for number in after] == [FIRST, FIRST]
    assert f"grant {after[0]} at 0" in world.log
    assert (world.shell.versions.of(FIRST), world.shell.versions.of(SECOND)) == (0, 1)


async def test_a_training_task_goes_to_the_newest_version_and_back_once_the_kept_rank_has_joined(world, prompt):
    world.shell.close_gate({SECOND})
    world.shell.open_gate(1, {SECOND})
    world.tasks["train.0.0.0"] = asyncio.create_task(world.shell.run(prompt, "train/0", 0, 0, "train"))
    await settle()
    number = world.call("train.0.0.0")
    await settle()
    assert world.router.ranks[number] == SECOND
    assert f"grant {number} at 1" in world.log
    world.turn("train.0.0.0", number)
    for session in world.sessions:
        world.tasks[session].cancel()
    await settle()
    world.shell.close_gate({FIRST})
    world.shell.open_gate(1, {FIRST})
    world.shell.quarantine(SECOND, "killed")
    number = world.call("train.0.0.0")
    await settle()
    assert world.router.ranks[number] == FIRST
    assert f"grant {number} at 1" in world.log


async def test_the_last_rank_of_a_version_is_never_closed_under_its_tasks(world):
    with pytest.raises(RunFailed, match="would lose its last rank"):
        world.shell.close_gate()
    number = world.call(world.sessions[0])
    await settle()
    assert number in world.router.ranks, "and no gate was closed"


async def test_r4_a_task_whose_version_died_with_its_rank_is_ended_without_a_reward(world, prompt):
    world.shell.close_gate({SECOND})
    world.shell.open_gate(1, {SECOND})
    world.shell.quarantine(FIRST, "killed")
    number = world.call(world.sessions[0])
    await settle()
    assert f"refuse {number} session_ended" in world.log
    late = await asyncio.wait_for(world.shell.run(prompt, "eval/0/sampled", 9, 0, "eval", version=0), 2)
    assert (late.outcome, late.reward) == ("refused", None)


async def test_calls_in_flight_are_waited_for_by_rank():
    calls = CallsInFlight()
    calls.begin("a", FIRST)
    calls.begin("b", SECOND, granted=False)
    assert calls.ranks() == {FIRST}
    waits = [asyncio.create_task(calls.drained(ranks)) for ranks in ({FIRST}, {SECOND}, None)]
    await settle()
    assert not any(wait.done() for wait in waits)
    calls.end("b")
    calls.end("never granted")
    await settle()
    assert [wait.done() for wait in waits] == [False, True, False]
    calls.end("a")
    await asyncio.wait_for(asyncio.gather(*waits), 2)
