"""Checks of pauses: epochs, turns while paused, and clocks that stand still."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from tide_sdk.check.answers import Answer, expect, refused, same
from tide_sdk.check.case import Failed, Skipped, case
from tide_sdk.check.cases_http import CALLS
from tide_sdk.check.talk import Talk, Task
from tide_sdk.clocks import ClockName, TaskState
from tide_sdk.wire import MAX_EPOCH, EpochResponse

PAUSE = "Pause and resume"
CLOCKS = "Clocks"
SLOW = "name an action that takes a second or more with --slow-action"
END = "name the actions that end a task with --end-action"
LIMIT_S = 1.0
"""Of the clocks that must not run out while paused."""
PAUSED_S = 2.0
SLOW_S = 0.9
"""An action that takes less is not a slow one."""
_SETTLE_S = 0.2
_POLL_S = 0.02
_POLLS = 200


def in_state(answer: EpochResponse, state: TaskState, epoch: int, what: str) -> None:
    """Check what a pause or a resume answered.

    Raises:
        Failed: another state or epoch.
    """
    if (answer.state, answer.epoch) != (state, epoch):
        wanted = f"{state.value} with epoch {epoch}"
        raise Failed(f"{what}: expected {wanted}, got {answer.state.value} with epoch {answer.epoch}")


@case("pause.states", PAUSE, "A pause of a waiting task answers paused, a resume waiting; without an epoch it is kept.")
async def states(talk: Talk) -> None:
    """Each twice: a repeated call finds the state that it asks for."""
    task = await talk.start()
    for _ in range(2):
        in_state(await talk.pause(task), TaskState.PAUSED, 0, "/pause without an epoch")
    for _ in range(2):
        in_state(await talk.resume(task), TaskState.WAITING, 0, "/resume without an epoch")
    in_state(await talk.pause(task, 4), TaskState.PAUSED, 4, "/pause with epoch 4")
    in_state(await talk.resume(task), TaskState.WAITING, 4, "/resume without an epoch after epoch 4")
    in_state(await talk.pause(task), TaskState.PAUSED, 4, "/pause without an epoch after epoch 4")
    in_state(await talk.resume(task, 5), TaskState.WAITING, 5, "/resume with epoch 5")
    await talk.act(task)


@case("pause.epochs", PAUSE, "An epoch that is not newer changes nothing and answers the present state.")
async def epochs(talk: Talk) -> None:
    """Late pauses and resumes; the greatest epoch is a whole number of 63 bits."""
    task = await talk.start()
    in_state(await talk.pause(task, 2), TaskState.PAUSED, 2, "/pause with epoch 2")
    in_state(await talk.resume(task, 1), TaskState.PAUSED, 2, "/resume with epoch 1 after a pause with epoch 2")
    in_state(await talk.resume(task, 2), TaskState.PAUSED, 2, "/resume with epoch 2 after a pause with epoch 2")
    in_state(await talk.resume(task, 3), TaskState.WAITING, 3, "/resume with epoch 3")
    in_state(await talk.pause(task, 2), TaskState.WAITING, 3, "/pause with epoch 2 after a resume with epoch 3")
    in_state(await talk.pause(task, 3), TaskState.WAITING, 3, "/pause with epoch 3 after a resume with epoch 3")
    in_state(await talk.pause(task, MAX_EPOCH - 1), TaskState.PAUSED, MAX_EPOCH - 1, "/pause with epoch 2^63-2")
    in_state(await talk.resume(task, MAX_EPOCH), TaskState.WAITING, MAX_EPOCH, "/resume with epoch 2^63-1")
    await talk.act(task)


@case("pause.turns", PAUSE, "While paused a new turn is 423 paused and not acted on; after the resume it is taken.")
async def turns(talk: Talk) -> None:
    """The observation can be read all the while."""
    task = await talk.start()
    await talk.pause(task, 1)
    for _ in range(2):
        refused(await talk.send("POST", "/observation", talk.action_of(task)), "paused")
    same(expect(await talk.get(task.task_id), 200).data["turn"], 0, "GET /observation while paused: turn")
    await talk.resume(task, 2)
    await talk.act(task)


@case("pause.clocks", CLOCKS, "No clock of a paused task moves.")
async def clocks(talk: Talk) -> None:
    """What is consumed stays the same through the pause, to the digit."""
    task = await talk.start()
    await asyncio.sleep(_SETTLE_S)
    first = await talk.pause(task, 1)
    await asyncio.sleep(_SETTLE_S)
    again = await talk.pause(task, 1)
    shown = expect(await talk.get(task.task_id), 200).data["clocks"]
    for name, clock in first.clocks.items():
        for consumed_s in (again.clocks[name].consumed_s, shown[name.value]["consumed_s"]):
            if consumed_s != clock.consumed_s:
                words = f"the clock {name.value} went from {clock.consumed_s} to {consumed_s} s while paused"
                raise Failed(words)
    after = (await talk.resume(task, 2)).clocks
    if after[ClockName.IDLE].consumed_s < first.clocks[ClockName.IDLE].consumed_s:
        raise Failed("the clock idle begins anew with a resume; it must go on where it stood")
    resumed = after[ClockName.ACTIVE].consumed_s
    await asyncio.sleep(_SETTLE_S)
    if expect(await talk.get(task.task_id), 200).data["clocks"]["active"]["consumed_s"] <= resumed:
        raise Failed("the clock active does not run after the resume")


@case("pause.timers", CLOCKS, "A pause holds the server's own timers, however long it lasts.")
async def timers(talk: Talk) -> None:
    """Longer than the limits of idle and active: the task is still there and takes its turn."""
    task = await talk.start(limits={"idle": LIMIT_S, "active": 2 * LIMIT_S})
    await talk.pause(task, 1)
    await asyncio.sleep(PAUSED_S)
    answer = await talk.get(task.task_id)
    if answer.status == 410:
        raise Failed(f"a task paused for {PAUSED_S:g} s expired: its idle limit of {LIMIT_S:g} s ran on")
    expect(answer, 200)
    in_state(await talk.resume(task, 2), TaskState.WAITING, 2, f"/resume after {PAUSED_S:g} s")
    await talk.act(task)


@case(
    "pause.acting", PAUSE, "A pause while acting answers pausing at once; a resume before the action ends cancels it."
)
async def acting(talk: Talk) -> None:
    """Then the action's answer comes, and the task is paused."""
    async with under_way(talk) as (task, call):
        in_state(await talk.pause(task, 1), TaskState.PAUSING, 1, "/pause while acting")
        in_state(await talk.resume(task, 2), TaskState.ACTING, 2, "/resume while pausing")
        in_state(await talk.pause(task, 3), TaskState.PAUSING, 3, "/pause while acting")
        talk.took(task, await call)
    if task.done:
        return
    refused(await talk.send("POST", "/observation", talk.action_of(task)), "paused")
    in_state(await talk.pause(task, 3), TaskState.PAUSED, 3, "/pause with the same epoch after the action")
    in_state(await talk.resume(task, 4), TaskState.WAITING, 4, "/resume after the action")
    await talk.act(task)


@case("health.acting", CALLS, "GET /health answers while environments act.")
async def health_acting(talk: Talk) -> None:
    """A gateway kills a server that does not."""
    async with under_way(talk) as (task, call):
        await talk.health()
        if call.done():
            raise Failed("GET /health was answered only after the action: a gateway takes such a server for dead")
        talk.took(task, await call)


@contextlib.asynccontextmanager
async def under_way(talk: Talk, **fields: Any) -> AsyncGenerator[tuple[Task, asyncio.Task[Answer]]]:
    """A new task whose slow action is under way, and the call that waits for it.

    Args:
        talk: with the server.
        fields: further fields of the start.

    Raises:
        Skipped: no slow action is known, or it was too quick.
        Failed: the server answers nothing, or the turn clock does not run, while the environment acts.
    """
    if talk.plan.slow_action is None:
        raise Skipped(SLOW)
    task = await talk.start(**fields)
    begun_s = time.monotonic()
    call = asyncio.create_task(talk.send("POST", "/observation", talk.action_of(task, talk.plan.slow_action)))
    try:
        for _ in range(_POLLS):
            if call.done():
                raise _over_already(time.monotonic() - begun_s)
            shown = expect(await talk.get(task.task_id), 200).data
            if shown["clocks"]["turn"]["consumed_s"] > 0:
                break
            await asyncio.sleep(_POLL_S)
        else:
            raise Failed("the clock turn does not run while the environment acts")
        yield task, call
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


def _over_already(took_s: float) -> Failed | Skipped:
    if took_s < SLOW_S:
        return Skipped(f"the slow action was too quick: {SLOW}")
    late = "GET /observation was answered only afterwards, or the clock turn stood still"
    return Failed(f"nothing was seen of an action that took {took_s:.1f} s: {late}")


CASES = (health_acting, states, epochs, turns, clocks, timers, acting)
