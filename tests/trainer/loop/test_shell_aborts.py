"""Calls that are taken back from their engine, and starts that find no place."""

from __future__ import annotations

import asyncio

import pytest
from shell_parts import RANK, begin, being_resumed, call, finish, settle, turn

from tide_trainer.scheduling.plan import Abort


def aborts(world, *sessions):
    """Has the scheduler ask for aborts in its next plan."""
    plan = world.shell._scheduler.plan

    def once(now_s):
        world.shell._scheduler.plan = plan
        return (*(Abort(session, RANK, "the engine is full") for session in sessions), *plan(now_s))

    world.shell._scheduler.plan = once
    world.shell._wake()


def aborted(world, session, number, dropped_tokens=3):
    about = {"session": session, "call": number, "code": "aborted", "retrying": True}
    world.router.events["call_failed"](about | {"dropped_tokens": dropped_tokens})


async def test_an_aborted_call_is_taken_back_and_its_task_paused_until_there_is_room(world, prompt):
    world = world(kv_tokens=60, budget_fraction=1.0)
    first, second = await begin(world, prompt, 0), await begin(world, prompt, 1)
    call(world, first, "a", 20, 5)
    call(world, second, "b", 20, 5)
    await settle()
    aborts(world, second)
    await settle()
    assert world.log[-1] == "abort b"
    assert world.shell.busy_ranks() == {RANK}
    turn(world, first, "a", 40)
    await settle()
    aborted(world, second, "b")
    call(world, second, "b2", 20, 5)
    await settle()
    assert world.log[-1] == "pause t1 1"
    assert world.shell.beliefs.calls(RANK) == ()
    await finish(world, first)
    await settle()
    assert world.log[-2:] == ["resume t1 2", "grant b2 at 0"]
    figures = world.shell.figures()
    assert (figures.num_aborts, figures.dropped_tokens) == (1, 3)
    await finish(world, second)


async def test_t6_an_abort_whose_turn_comes_all_the_same_changes_nothing(world, prompt):
    world = world()
    session = await begin(world, prompt)
    call(world, session, "a")
    await settle()
    aborts(world, session)
    turn(world, session, "a")
    await settle()
    aborts(world, session, "never heard of")
    await settle()
    call(world, session, "b")
    await settle()
    assert world.log[-1] == "grant b at 0"
    assert not any(line.startswith("abort") for line in world.log)
    await finish(world, session)
    assert not world.shell.failed.done()


async def test_t6_an_abort_of_a_call_that_is_being_resumed_takes_its_grant_back(world, prompt):
    world = world()
    session, answered = await being_resumed(world, prompt)
    aborts(world, session)
    await settle()
    assert not any(line.startswith("abort") for line in world.log)
    world.shell.close_gate()
    answered.set()
    await settle()
    assert world.log[-1] == "pause t0 3", "held again, and not granted now"
    assert world.shell.busy_ranks() == frozenset()
    world.shell.open_gate(1)
    await settle()
    assert world.log.count("grant a at 1") == 1
    turn(world, session, "a")
    await settle()
    await asyncio.wait_for(world.shell.drained(), 2)
    await finish(world, session)


async def test_t6_an_abort_and_a_cancelled_task_do_not_hurt_the_shell(world, prompt):
    world = world()
    session = await begin(world, prompt)
    call(world, session, "a")
    await settle()
    aborts(world, session)
    await settle()
    world.tasks[session].cancel()
    await settle()
    aborted(world, session, "a")
    call(world, session, "a2")
    await settle()
    assert world.log[-1] == "refuse a2 session_closed"
    assert world.shell.beliefs.calls(RANK) == ()
    await asyncio.wait_for(world.shell.drained(), 2)
    assert not world.shell.failed.done()


async def test_a_start_without_a_place_goes_back_to_the_queue_with_the_same_attempt(world, prompt):
    world = world()
    running = asyncio.create_task(world.shell.run(prompt, "train/0", 0, 1, "train"))
    await settle()
    session = "train.0.0.1"
    world.tasks[session] = running
    refused = {"outcome": "infrastructure", "reward": None, "turns": 0, "error": "full", "retry_after_s": 3.0}
    world.workers.running[session].set_result(refused)
    await settle()
    assert not running.done(), "no attempt is used up"
    assert world.shell.view().num_queued == 1
    assert world.shell.figures().num_requeues == 1
    world.clock.s += 2.9
    world.shell._wake()
    await settle()
    assert world.log.count(f"run {session} as run/train/0/0") == 1
    world.clock.s += 0.2
    world.shell._wake()
    await settle()
    assert world.log.count(f"run {session} as run/train/0/0") == 2
    assert world.shell.paused_s("train/0") == pytest.approx(3.1)
    world.workers.started({"session": session, "task_id": "t0"})
    call(world, session, "a")
    await settle()
    turn(world, session, "a")
    found = await finish(world, session)
    assert found.outcome == "completed"


async def test_a_task_that_waits_for_a_place_again_can_be_cancelled(world, prompt):
    world = world()
    session = await begin(world, prompt)
    refused = {"outcome": "infrastructure", "reward": None, "turns": 0, "error": "full", "retry_after_s": 3.0}
    world.workers.running[session].set_result(refused)
    await settle()
    world.tasks[session].cancel()
    await settle()
    assert world.shell.view().num_queued == 0
    assert world.log.count(f"close {session}") == 1
    assert not world.shell.failed.done()
