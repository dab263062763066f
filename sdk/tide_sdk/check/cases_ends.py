"""Checks of how tasks end: by a clock, by the caller, by the environment."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tide_sdk.check.answers import expect, refused, same
from tide_sdk.check.case import Failed, Skipped, case
from tide_sdk.check.cases_pauses import CLOCKS, END, LIMIT_S, SLOW, SLOW_S, in_state, under_way
from tide_sdk.check.talk import Talk, Task
from tide_sdk.clocks import TaskState

THE_END = "The end"
STATES = "States"
LATE_S = 10.0
"""Seconds after its limit in which a clock must have ended the task."""
_POLL_S = 0.1
_POLLS = 50
_TURN_PAUSE_S = 0.3
_SHORT_S = 0.2


@case("clock.counts", CLOCKS, "idle and turn begin anew with each turn, active adds up.")
async def counts(talk: Talk) -> None:
    """Some time passes in each of two turns."""
    task = await talk.start()
    actives: list[float] = []
    for _ in range(2):
        await asyncio.sleep(_TURN_PAUSE_S)
        clocks = (await talk.act(task))["clocks"]
        actives.append(clocks["active"]["consumed_s"])
        if not task.done and clocks["idle"]["consumed_s"] > actives[0] / 2:
            raise Failed(f"the clock idle shows {clocks['idle']['consumed_s']} s at the begin of a turn")
        if task.done:
            raise Skipped("the actions ended the task too early; name one that does not with --action")
    if actives[0] < _TURN_PAUSE_S * 0.9 or actives[1] < actives[0] + _TURN_PAUSE_S * 0.9:
        raise Failed(f"the clock active shows {actives} s after two turns of {_TURN_PAUSE_S} s and more")


@case("clock.idle", CLOCKS, "A task whose idle clock has passed is 410 expired; reads extend nothing.")
async def idle(talk: Talk) -> None:
    """It is read all the while; the account names the clock."""
    task = await talk.start(limits={"idle": LIMIT_S})
    await _until_expired(talk, task, "idle", LIMIT_S)
    answer = refused(await talk.send("POST", "/observation", talk.action_of(task)), "expired")
    same(answer.fields.get("clock"), "idle", "the clock of the error expired")
    refused(await talk.post("/pause", task_id=task.task_id), "expired")
    refused(await talk.post("/resume", task_id=task.task_id), "expired")
    _outcome(await talk.end(task), "expired", "idle")


@case("clock.active", CLOCKS, "A task whose active clock has passed expires, however many turns it takes.")
async def active(talk: Talk) -> None:
    """A turn in the middle begins the idle clock anew, not this one."""
    task = await talk.start(limits={"idle": LIMIT_S + LATE_S, "active": LIMIT_S})
    await asyncio.sleep(LIMIT_S / 2)
    answer = await talk.send("POST", "/observation", talk.action_of(task))
    if answer.status != 410:  # a slow machine's active clock may have passed
        talk.took(task, answer)
        if task.done:
            raise Skipped("the first action ended the task; name one that does not with --action")
    await _until_expired(talk, task, "active", LIMIT_S)
    _outcome(await talk.end(task), "expired", "active")


@case("clock.turn", CLOCKS, "A turn that takes longer than its clock is 504 turn_expired, then 410; no reward.")
async def turn(talk: Talk) -> None:
    """The slow action under a short limit."""
    begun_s = time.monotonic()
    async with under_way(talk, limits={"turn": _SHORT_S}) as (task, call):
        answer = await call
        took_s = time.monotonic() - begun_s
        if answer.status == 200 and took_s < SLOW_S:
            raise Skipped(f"the slow action was too quick: {SLOW}")
        if answer.status == 200:
            raise Failed(f"an action that took {took_s:.1f} s was answered under a turn limit of {_SHORT_S:g} s")
        refused(answer, "turn_expired")
        again = talk.action_of(task, talk.plan.slow_action)
        for number in (0, 1):
            refused(await talk.send("POST", "/observation", again | {"turn": number}), "expired")
        account = await talk.end(task)
    _outcome(account, "expired", "turn")
    if account["reward"] is not None:
        raise Failed(f"after an expired turn the reward is {account['reward']} and not null")


@case(
    "end.account",
    THE_END,
    "/end of a running task answers reward, metrics, turns, clocks, and aborted with the reason.",
)
async def account_of_end(talk: Talk) -> None:
    """Before any turn, after one, and while paused; the turns are counted."""
    for num_turns, paused in ((0, False), (1, False), (0, True)):
        task = await talk.start()
        for _ in range(num_turns):
            await talk.act(task)
        if task.done:
            continue
        if paused:
            await talk.pause(task, 1)
        account = await talk.end(task, "enough")
        same(account["turns"], num_turns, "the account's turns and the turns that were taken")
        _outcome(account, "aborted", None)
        same(account["outcome"].get("reason"), "enough", "the outcome's reason and the reason that was sent")
        if account["reward"] is None:
            raise Failed("the reward of an ended task is null; by default it is the sum of the turns' rewards, here 0")


@case("end.repeat", THE_END, "/end may be repeated and gives the same account.")
async def repeat(talk: Talk) -> None:
    """One after the other, with another reason, and at once."""
    task = await talk.start()
    await talk.act(task)
    body = {"task_id": task.task_id, "reason": "enough"}
    answers = await asyncio.gather(*(talk.send("POST", "/end", body) for _ in range(4)))
    account = await talk.end(task, "another reason")
    for answer in answers:
        same(expect(answer, 200).data, account, "/end repeated")


@case("end.afterwards", THE_END, "After the end a new turn, a read, a pause and a resume are 410 ended.")
async def afterwards(talk: Talk) -> None:
    """The task is remembered, not 404."""
    task = await talk.start()
    await talk.end(task)
    refused(await talk.send("POST", "/observation", talk.action_of(task)), "ended")
    refused(await talk.get(task.task_id), "ended")
    refused(await talk.post("/pause", task_id=task.task_id), "ended")
    refused(await talk.post("/resume", task_id=task.task_id, epoch=3), "ended")


@case("end.acting", THE_END, "/end while acting answers at once, and the waiting call gets 410 ended.")
async def acting(talk: Talk) -> None:
    """The turn that was cut off is not counted, and does not act again."""
    async with under_way(talk) as (task, call):
        account = await talk.end(task, "enough")
        refused(await call, "ended")
    _outcome(account, "aborted", None)
    same(account["turns"], 0, "the account's turns after an end in the first turn")
    refused(await talk.send("POST", "/observation", talk.action_of(task, talk.plan.slow_action)), "ended")


@case(
    "end.done", STATES, "A task that the environment ended is done: read, repeat and /end; no clock runs, no new turn."
)
async def done(talk: Talk) -> None:
    """The actions that end it, one after the other."""
    actions = talk.plan.end_actions
    if not actions:
        raise Skipped(END)
    before = (await talk.health()).tasks
    task = await talk.start()
    last: dict[str, Any] = {}
    for action in actions:
        if not task.done:
            last = talk.action_of(task, action)
            await talk.act(task, action)
    if not task.done:
        raise Failed("the actions of --end-action did not end the task")
    observed = task.observations[-1]
    same(expect(await talk.send("POST", "/observation", last), 200).data, observed, "the last turn repeated when done")
    refused(await talk.send("POST", "/observation", talk.action_of(task)), "state_conflict")
    first = expect(await talk.get(task.task_id), 200).data
    await asyncio.sleep(_POLL_S)
    same(expect(await talk.get(task.task_id), 200).data, first, "GET /observation of a done task, twice")
    in_state(await talk.pause(task, 1), TaskState.DONE, 1, "/pause of a done task")
    held = (await talk.health()).tasks - before
    for _ in range(_POLLS):
        if held <= 0:
            break
        await asyncio.sleep(_POLL_S)
        held = (await talk.health()).tasks - before
    else:
        raise Failed("a done task still holds its place: it is let go at once, not with /end")
    account = await talk.end(task)
    _outcome(account, "completed" if observed["terminated"] else "truncated", None)
    same(account["turns"], task.turn, "the account's turns and the turns that were taken")
    same(await talk.end(task, "late"), account, "/end of a done task, repeated with a reason")


async def _until_expired(talk: Talk, task: Task, clock: str, limit_s: float) -> None:
    for _ in range(int((limit_s + LATE_S) / _POLL_S)):
        answer = await talk.get(task.task_id)
        if answer.status != 200:
            refused(answer, "expired")
            same(answer.fields.get("clock"), clock, "the clock of the error expired")
            return
        await asyncio.sleep(_POLL_S)
    raise Failed(f"the {clock} limit of {limit_s:g} s has not ended the task {LATE_S:g} s later")


def _outcome(account: dict[str, Any], kind: str, clock: str | None) -> None:
    outcome = account["outcome"]
    if (outcome["kind"], outcome.get("clock")) != (kind, clock):
        raise Failed(f"the outcome is {outcome}; expected {kind}" + (f" with the clock {clock}" if clock else ""))


CASES = (counts, idle, active, turn, account_of_end, repeat, afterwards, acting, done)
