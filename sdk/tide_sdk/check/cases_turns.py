"""Checks of turns: their order, and that each acts exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tide_sdk import codec
from tide_sdk.check.answers import expect, parse, refused, same
from tide_sdk.check.case import Failed, Skipped, case
from tide_sdk.check.cases_http import CALLS, connect
from tide_sdk.check.cases_pauses import under_way
from tide_sdk.check.talk import Talk, Task
from tide_sdk.wire import ObservationResponse

ONCE = "Exactly once"
_TURNS = 4
_REPEATS = 8
_BEYOND_DOUBLE = 2**53 + 1
"""As a double it is the whole number before it."""
_SEEN = ("messages", "reward", "terminated", "truncated", "info")
Act = Callable[[Talk, Task], Awaitable[None]]


@case(
    "turn.answer",
    CALLS,
    "A turn is answered with the next turn, messages, reward, terminated, truncated, info, clocks.",
)
async def answer_of_turn(talk: Talk) -> None:
    """Some turns of one task, as a gateway reads them."""
    task = await talk.start()
    while task.turn < _TURNS and not task.done:
        await talk.act(task)


@case("turn.latest", CALLS, "GET /observation gives the latest observation again and changes nothing.")
async def latest(talk: Talk) -> None:
    """Before the first turn and after it, many times."""
    task = await talk.start()
    before = expect(await talk.get(task.task_id), 200)
    parse(ObservationResponse, before)
    same(before.data["messages"], task.started["messages"], "GET /observation before the first turn and the start")
    if before.data["turn"] != 0:
        raise Failed(f"GET /observation before the first turn: turn is {before.data['turn']} and not 0")
    observed = await talk.act(task)
    for _ in range(3):
        again = expect(await talk.get(task.task_id), 200)
        parse(ObservationResponse, again)
        same(_without_clocks(again.data), _without_clocks(observed), "GET /observation and the turn's answer")


@case("turn.repeat", ONCE, "A repeated turn gets the stored answer and does not act again.")
async def repeat(talk: Talk) -> None:
    """After each turn, in the same and in other words; the following turns are those of a task without repeats."""

    async def thrice(talk: Talk, task: Task) -> None:
        body = talk.action_of(task)
        observed = await talk.act(task)
        reordered = {"message": dict(reversed(body["message"].items())), "turn": body["turn"], "task_id": task.task_id}
        spaced = codec.dumps(reordered).replace(b'"turn":', b'\n "turn" : ')
        for again in (codec.dumps(body), codec.dumps(reordered), spaced):
            answer = expect(await talk.send("POST", "/observation", body=again), 200)
            same(answer.data, observed, f"turn {body['turn']} repeated")

    await _acts_once(talk, thrice)


@case("turn.concurrent", ONCE, "The same turn many times at once acts once, and every call gets the same answer.")
async def concurrent(talk: Talk) -> None:
    """Eight at once, turn by turn."""

    async def at_once(talk: Talk, task: Task) -> None:
        body = talk.action_of(task)
        answers = await asyncio.gather(*(talk.send("POST", "/observation", body) for _ in range(_REPEATS)))
        talk.took(task, answers[0])
        for answer in answers:
            same(expect(answer, 200).data, answers[0].data, f"turn {body['turn']} many times at once")

    await _acts_once(talk, at_once)


@case("turn.dropped", ONCE, "An action goes on when its caller goes away; the next call gets its answer.")
async def dropped(talk: Talk) -> None:
    """The connection is dropped once the action is sent, and the turn is sent again."""

    async def drop(talk: Talk, task: Task) -> None:
        body = codec.dumps(talk.action_of(task))
        async with connect(talk) as connection:
            await connection.write(connection.post("/observation", body))
        await talk.act(task)

    await _acts_once(talk, drop)


async def _acts_once(talk: Talk, act: Act) -> None:
    """Play a task in an awkward way; it must go as a task that is played plainly."""
    plain = await _play(talk, _plainly)
    awkward = await _play(talk, act)
    same(awkward[1]["turns"], len(awkward[0]), "the account's turns and the turns that were taken")
    again = await _play(talk, _plainly)
    if codec.dumps([plain[0], plain[1]["reward"]]) != codec.dumps([again[0], again[1]["reward"]]):
        talk.notes.append("the environment differs from task to task: following turns were not compared")
        return
    for turn, (one, other) in enumerate(zip(awkward[0], plain[0], strict=False)):
        same(one, other, f"turn {turn} of a task with repeats and of one without")
    same(awkward[0], plain[0], "a task with repeats and one without")
    for name in ("reward", "turns", "metrics"):
        same(awkward[1][name], plain[1][name], f"{name} in the account of a task with repeats and of one without")


async def _play(talk: Talk, act: Act) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    task = await talk.start(seed=7)
    while task.turn < _TURNS and not task.done:
        await act(talk, task)
    seen = [{name: observed[name] for name in _SEEN} for observed in task.observations]
    return seen, await talk.end(task)


async def _plainly(talk: Talk, task: Task) -> None:
    await talk.act(task)


@case(
    "turn.acting",
    ONCE,
    "While a turn is under way, the same one joins it, another message is 409, and so is the next turn.",
)
async def acting(talk: Talk) -> None:
    """And the caller that waits may go away: the action goes on."""
    async with under_way(talk) as (task, call):
        body = talk.action_of(task, talk.plan.slow_action)
        refused(await talk.send("POST", "/observation", body | {"message": talk.plan.action("else")}), "turn_conflict")
        refused(await talk.send("POST", "/observation", body | {"turn": 1}), "turn_order")
        call.cancel()
        joined = await talk.send("POST", "/observation", body)
    observed = talk.took(task, joined)
    same(expect(await talk.send("POST", "/observation", body), 200).data, observed, "the slow turn repeated")
    account = await talk.end(task)
    same(account["turns"], 1, "the account's turns and the turns that were taken")


@case("turn.conflict", ONCE, "The same turn with another message is 409 turn_conflict.")
async def conflict(talk: Talk) -> None:
    """While it is the last turn; its answer stays."""
    task = await talk.start()
    body = talk.action_of(task)
    observed = await talk.act(task)
    for message in (talk.plan.action("something else"), body["message"] | {"more": None}):
        refused(await talk.send("POST", "/observation", body | {"message": message}), "turn_conflict")
    same(expect(await talk.send("POST", "/observation", body), 200).data, observed, "the turn after a conflict")


@case("turn.numbers", ONCE, "Messages compare as parsed JSON: 1 equals 1.0, true is not 1; whole numbers to 64 bits.")
async def numbers(talk: Talk) -> None:
    """A further field of the message, written in other ways."""
    task = await talk.start()
    body = talk.action_of(task)
    known = body | {"message": body["message"] | {"x_number": 1}}
    observed = talk.took(task, await talk.send("POST", "/observation", known))
    for text in (b"1.0", b"1e0", b"1"):
        data = codec.dumps(known).replace(b'"x_number":1', b'"x_number":' + text)
        answer = expect(await talk.send("POST", "/observation", body=data), 200)
        same(answer.data, observed, f"a turn with 1 written as {text.decode()}")
    for text in (b"true", b"1.5", b'"1"'):
        data = codec.dumps(known).replace(b'"x_number":1', b'"x_number":' + text)
        refused(await talk.send("POST", "/observation", body=data), "turn_conflict")
    if task.done:
        return
    known = talk.action_of(task)
    known["message"]["x_number"] = _BEYOND_DOUBLE
    talk.took(task, await talk.send("POST", "/observation", known))
    other = known | {"message": known["message"] | {"x_number": _BEYOND_DOUBLE - 1}}
    refused(await talk.send("POST", "/observation", other), "turn_conflict")


@case("turn.order", ONCE, "A turn that is neither the last nor the next is 409 turn_order.")
async def order(talk: Talk) -> None:
    """Too far ahead, before and after the first turn; nothing is acted on."""
    task = await talk.start()
    refused(await talk.send("POST", "/observation", talk.action_of(task) | {"turn": 1}), "turn_order")
    await talk.act(task)
    if task.done:
        raise Skipped("the first action ended the task; name one that does not with --action")
    refused(await talk.send("POST", "/observation", talk.action_of(task) | {"turn": 9}), "turn_order")
    await talk.act(task)


@case("turn.older", ONCE, "A turn before the last one gets its stored answer, or 409 turn_order: it never acts.")
async def older(talk: Talk) -> None:
    """A server may remember its last turn only; the gateway has all others."""
    task = await talk.start()
    body = talk.action_of(task)
    first = await talk.act(task)
    await talk.act(task)
    answer = await talk.send("POST", "/observation", body)
    if answer.status == 200:
        same(answer.data, first, "an older turn repeated")
    else:
        refused(answer, "turn_order")
    same(expect(await talk.get(task.task_id), 200).data["turn"], 2, "GET /observation after an older turn: turn")


@case("turn.every_state", ONCE, "The last turn's answer is there in every state: paused, ended.")
async def every_state(talk: Talk) -> None:
    """The same answer each time."""
    task = await talk.start()
    body = talk.action_of(task)
    observed = await talk.act(task)
    await talk.pause(task)
    same(expect(await talk.send("POST", "/observation", body), 200).data, observed, "a turn repeated while paused")
    await talk.end(task)
    same(expect(await talk.send("POST", "/observation", body), 200).data, observed, "a turn repeated after the end")
    other = body | {"message": talk.plan.action("something else")}
    refused(await talk.send("POST", "/observation", other), "turn_conflict")


def _without_clocks(observed: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in observed.items() if name != "clocks"}


CASES = (answer_of_turn, latest, repeat, concurrent, dropped, acting, conflict, numbers, order, older, every_state)
