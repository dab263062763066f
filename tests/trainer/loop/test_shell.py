from __future__ import annotations

import asyncio

import pytest
from shell_parts import RANK, begin, being_resumed, call, finish, settle, turn

from tide_sdk.errors import TideError
from tide_trainer.errors import RunFailed
from tide_trainer.types import EngineInfo, RankId


async def test_a_task_is_opened_run_granted_and_becomes_its_trajectory(world, prompt):
    world = world()
    session = await begin(world, prompt)
    call(world, session, "a")
    await settle()
    turn(world, session, "a")
    found = await finish(world, session, messages=[{"role": "user"}], metrics={"x": 1})
    assert world.log == [
        "open train.0.0.0 at 1.0", "run train.0.0.0 as run/train/0/0", "grant a at 0", "close train.0.0.0",
    ]  # fmt: skip
    assert (found.uid, found.reward, found.outcome, found.version) == ("train/0/0", 1.0, "completed", 3)
    assert found.segments[0].token_ids == (1, 2)
    assert dict(found.metrics) == {"x": 1}
    figures = world.shell.figures()
    assert (figures.num_turns, figures.hit_rate, figures.completion_tokens) == (1, 0.4, 2)


async def test_a_call_during_a_sync_is_paused_at_the_gateway_and_resumed_before_its_grant(world, prompt):
    world = world()
    session = await begin(world, prompt)
    world.shell.close_gate()
    call(world, session, "a")
    await settle()
    assert world.log[-1] == "pause t0 1"
    world.shell.open_gate(4)
    await settle()
    assert world.log[-2:] == ["resume t0 2", "grant a at 4"]
    await finish(world, session)


async def test_a_pause_waits_until_the_task_is_known_at_the_gateway(world, prompt):
    world = world()
    running = asyncio.create_task(world.shell.run(prompt, "train/0", 0, 0, "train"))
    await settle()
    world.shell.close_gate()
    call(world, "train.0.0.0", "a")
    world.shell.open_gate(1)
    await settle()
    assert not any(entry.startswith(("pause", "grant")) for entry in world.log[2:-1])
    world.workers.started({"session": "train.0.0.0", "task_id": "t0"})
    await settle()
    assert "grant a at 1" in world.log
    world.tasks["train.0.0.0"] = running
    await finish(world, "train.0.0.0")


async def test_a_task_that_does_not_fit_is_paused_until_another_leaves(world, prompt):
    world = world(kv_tokens=40, budget_fraction=1.0)
    first, second = await begin(world, prompt, 0), await begin(world, prompt, 1)
    call(world, first, "a", 20, 5)
    await settle()
    turn(world, first, "a", 25)
    call(world, second, "b", 20, 5)
    await settle()
    assert world.log[-1] == "pause t1 1"
    await finish(world, first)
    await settle()
    assert world.log[-2:] == ["resume t1 2", "grant b at 0"]
    await finish(world, second)
    figures = world.shell.figures()
    assert (figures.num_pauses, figures.num_resumes) == (1, 1)


async def test_a_pause_that_fails_is_counted_and_the_call_is_granted_all_the_same(world, prompt):
    world = world(failure=TideError("unavailable", "the gateway is away"))
    session = await begin(world, prompt)
    world.shell.close_gate()
    call(world, session, "a")
    await settle()
    world.shell.open_gate(1)
    await settle()
    assert world.log[-1] == "grant a at 1"
    assert world.shell.figures().num_failed_controls == 2
    await finish(world, session)


async def test_a_sync_waits_for_granted_calls_however_they_end(world, prompt):
    world = world()
    first, second = await begin(world, prompt, 0), await begin(world, prompt, 1)
    call(world, first, "a")
    call(world, second, "b")
    await settle()
    world.shell.close_gate()
    drained = asyncio.create_task(world.shell.drained())
    await settle()
    turn(world, first, "a")
    await settle()
    assert not drained.done()
    world.router.events["call_failed"]({"session": second, "call": "b", "retrying": False})
    await asyncio.wait_for(drained, 2)
    await finish(world, first)
    await finish(world, second)


async def test_a_sync_waits_for_a_call_whose_task_is_being_resumed(world, prompt):
    world = world()
    session, answered = await being_resumed(world, prompt)
    world.shell.close_gate()
    drained = asyncio.create_task(world.shell.drained())
    await settle()
    assert not drained.done(), "its grant would go out in the middle of the sync"
    answered.set()
    await settle()
    assert world.log[-1] == "grant a at 1"
    assert world.shell.busy_ranks() == {RANK}
    turn(world, session, "a")
    await asyncio.wait_for(drained, 2)
    await finish(world, session)


async def test_a_call_whose_rank_died_is_asked_again_and_granted_on_another(world, prompt):
    world = world()
    world.shell.add_rank(EngineInfo(RankId("rollout", 1), "http://engine", 200, 1, 100))
    session = await begin(world, prompt)
    call(world, session, "a")
    await settle()
    world.shell.quarantine(RANK, "killed")
    world.router.events["call_failed"]({"session": session, "call": "a", "retrying": True})
    call(world, session, "a2")
    await settle()
    assert "drop rollout:0" in world.log
    assert "grant a2 at 0" in world.log
    await finish(world, session)


async def test_a_task_larger_than_the_budget_is_refused_with_a_context_overflow(world, prompt):
    world = world(kv_tokens=50, budget_fraction=1.0)
    session = await begin(world, prompt)
    call(world, session, "a", 80, 5)
    await settle()
    assert world.log[-1] == "refuse a context_length_exceeded"
    await finish(world, session, outcome="context_overflow", reward=0.0)


async def test_cancelling_aborts_the_attempt_and_frees_its_place(world, prompt):
    world = world()
    session = await begin(world, prompt)
    call(world, session, "a")
    await settle()
    world.tasks[session].cancel()
    await settle()
    assert world.workers.running[session].cancelled()
    assert world.log[-1] == f"close {session}"
    assert world.shell.view().ranks[0].usage_tokens == 0
    call(world, session, "late")
    assert world.log[-1] == "refuse late session_closed"


async def test_a_task_that_ends_while_it_is_being_resumed_is_not_granted(world, prompt):
    world = world()
    session, answered = await being_resumed(world, prompt)
    world.tasks[session].cancel()
    await settle()
    world.router.events["call_cancelled"]({"session": session, "call": "a", "rank": None})
    answered.set()
    await settle()
    assert not any(line.startswith("grant") for line in world.log)
    assert not world.shell.failed.done()
    await asyncio.wait_for(world.shell.drained(), 2)


async def test_a_fault_of_the_shell_ends_the_run_instead_of_hanging_it(world, prompt):
    world = world()
    await begin(world, prompt)
    world.workers.running["train.0.0.0"].set_exception(ValueError("nonsense"))
    with pytest.raises(RunFailed, match="nonsense"):
        await asyncio.wait_for(world.shell.failed, 2)
    await world.shell.close()
    world.tasks["train.0.0.0"].cancel()


async def test_a_held_call_stops_its_episode_and_a_grant_lets_it_go_on(world, prompt):
    world = world()
    session = await begin(world, prompt)
    world.clock.s += 1
    world.shell.close_gate()
    call(world, session, "a")
    await settle()
    world.clock.s += 10
    assert world.shell.paused_s("train/0") == 10
    world.shell.open_gate(1)
    await settle()
    world.clock.s += 2
    turn(world, session, "a")
    assert world.shell.paused_s("train/0") == 10
    assert world.shell.episode_s("toy") is None
    await finish(world, session)
    assert world.shell.episode_s("toy") == 3
    assert world.shell.paused_s("train/0") == 0


async def test_a_call_that_is_refused_or_cancelled_stops_no_episode(world, prompt):
    world = world(kv_tokens=50, budget_fraction=1.0)
    session = await begin(world, prompt)
    call(world, session, "a", 80, 5)
    await settle()
    world.clock.s += 4
    call(world, session, "b", 20, 5)
    world.router.events["call_cancelled"]({"session": session, "call": "b", "rank": None})
    await settle()
    world.clock.s += 4
    assert world.shell.paused_s("train/0") == 0
    await finish(world, session, outcome="context_overflow", reward=0.0)
    assert world.shell.episode_s("toy") == 8
