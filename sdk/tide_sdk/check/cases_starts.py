"""Checks of starts: what they answer, their keys and attempts, and how many tasks a server holds."""

from __future__ import annotations

import asyncio
import unicodedata

from tide_sdk.check.answers import Answer, expect, refused, same
from tide_sdk.check.case import Failed, Skipped, case
from tide_sdk.check.cases_http import CALLS
from tide_sdk.check.talk import Talk, Task
from tide_sdk.clocks import ClockName
from tide_sdk.wire import MAX_KEY_CHARS

KEYS = "Keys and attempts"
CAPACITY = "Capacity"
_TOLERANCE_S = 0.01
_MORE_THAN_FIT = 4


@case("start.answer", CALLS, "A start is 201 with task_id, turn 0, messages, tools, limits and clocks.")
async def answer_of_start(talk: Talk) -> None:
    """The limits are those that were asked for, and each of the five clocks has its own."""
    asked = {"idle": 700.5, "turn": 60.0}
    started = (await talk.start(limits=asked)).started
    limits, clocks = started["limits"], started["clocks"]
    if started["turn"] != 0:
        raise Failed(f"POST /start: turn is {started['turn']}; the first action is turn 0")
    names = {name.value for name in ClockName}
    if set(limits) != names or set(clocks) != names:
        raise Failed(f"POST /start: limits and clocks must name {', '.join(sorted(names))}, each once")
    for name, limit_s in asked.items():
        if limits[name] != limit_s:
            raise Failed(f"POST /start: the limit {name} was asked for as {limit_s}, and is {limits[name]}")
    for name, clock in clocks.items():
        if clock["limit_s"] != limits[name]:
            raise Failed(f"POST /start: the clock {name} has limit_s {clock['limit_s']}, limits says {limits[name]}")
        if min(clock.values()) < 0 or abs(clock["consumed_s"] + clock["remaining_s"] - clock["limit_s"]) > _TOLERANCE_S:
            raise Failed(f"POST /start: the clock {name} does not add up: {clock}")


@case("start.optional", CALLS, "What has a default may be absent, and null, but for kind and attempt.")
async def optional(talk: Talk) -> None:
    """As a gateway sends it, with all five limits and without a seed; and with nulls."""
    body = talk.start_body(kind="eval", limits={name.value: 1.5 * 3600 + 60 for name in ClockName})
    del body["seed"]
    talk.begun(body, await talk.send("POST", "/start", body))
    nothing = talk.start_body(seed=None, limits=None, attempt=0, kind="train")
    nothing |= {name: nothing.get(name) for name in ("task", "split")}
    task = talk.begun(nothing, await talk.send("POST", "/start", nothing))
    for path, field in (("/pause", "epoch"), ("/resume", "epoch"), ("/end", "reason")):
        expect(await talk.send("POST", path, {"task_id": task.task_id, field: None}), 200)


@case(
    "start.repeat", KEYS, "A repeated start with the same key returns the first answer, also after turns and the end."
)
async def repeat(talk: Talk) -> None:
    """In the words of the first call, with its fields in another order, and with what it left out as the defaults."""
    body = talk.start_body(seed=5)
    first = await talk.send("POST", "/start", body)
    task = talk.begun(body, first)
    same(first.data, (await talk.send("POST", "/start", body)).data, "a repeated start")
    await talk.act(task)
    reordered = dict(reversed(body.items()))
    defaults = {"attempt": 0, "kind": "train", "limits": None} | {name: body.get(name) for name in ("task", "split")}
    for again in (reordered, body | defaults):
        answer = expect(await talk.send("POST", "/start", again), 201)
        same(first.data, answer.data, "a start repeated after a turn")
    await talk.end(task)
    same(first.data, expect(await talk.send("POST", "/start", body), 201).data, "a start repeated after the end")


@case("start.join", KEYS, "Starts with the same key at the same time are one start.")
async def join(talk: Talk) -> None:
    """Eight of them hold one place and get the same answer."""
    before = (await talk.health()).tasks
    body = talk.start_body()
    answers = await asyncio.gather(*(talk.send("POST", "/start", body) for _ in range(8)))
    for answer in answers:
        talk.begun(body, answer)
        same(answers[0].data, answer.data, "starts with the same key at the same time")
    held = (await talk.health()).tasks - before
    if held != 1:
        raise Failed(f"starts with the same key at the same time: GET /health counts {held} tasks and not 1")


@case("start.key_conflict", KEYS, "The same key with another body is 409 key_conflict.")
async def key_conflict(talk: Talk) -> None:
    """Another seed, split, kind and task; the task goes on."""
    body = talk.start_body(seed=5)
    task = talk.begun(body, await talk.send("POST", "/start", body))
    for change in ({"seed": 6}, {"split": "other"}, {"kind": "eval"}, {"task": {"another": "task"}}):
        refused(await talk.send("POST", "/start", body | change), "key_conflict")
    await talk.act(task)


@case("start.keys", KEYS, "A key has up to 512 characters, and keys are compared exactly.")
async def keys(talk: Talk) -> None:
    """Two that look alike but are not the same are two tasks; characters are counted, not bytes."""
    composed = "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{CJK UNIFIED IDEOGRAPH-7A0E}\U0001f33b"
    longest = "\U0001f33b" * MAX_KEY_CHARS
    seen: dict[str, str] = {}
    for key in (
        composed,
        unicodedata.normalize("NFD", composed),
        composed[:-1] + "\U0001f33c",
        composed + " ",
        longest,
    ):
        task = await talk.start(key=key)
        if task.task_id in seen:
            raise Failed(f"the keys {seen[task.task_id]!r} and {key!r} are taken for the same")
        seen[task.task_id] = key
        await talk.end(task)


@case("start.attempt", KEYS, "A higher attempt ends the older one; a lower one, and a replaced one's turn, are 409.")
async def attempt(talk: Talk) -> None:
    """The older task's stored answer is still there."""
    body = talk.start_body()
    old = talk.begun(body, await talk.send("POST", "/start", body))
    action = talk.action_of(old)
    first = await talk.act(old)
    newer = body | {"attempt": 3}
    new = talk.begun(newer, await talk.send("POST", "/start", newer))
    if new.task_id == old.task_id:
        raise Failed("a higher attempt was answered with the older one's task")
    refused(await talk.send("POST", "/start", body | {"attempt": 2}), "stale_attempt")
    refused(await talk.send("POST", "/start", body), "stale_attempt")
    same(expect(await talk.send("POST", "/observation", action), 200).data, first, "a replaced attempt's last turn")
    refused(await talk.send("POST", "/observation", talk.action_of(old)), "stale_attempt")
    account = await talk.end(old)
    if not old.done and account["outcome"]["kind"] != "aborted":
        raise Failed(f"the replaced attempt's outcome is {account['outcome']} and not aborted")
    same((await talk.send("POST", "/start", newer)).data, new.started, "the newer attempt's start repeated")
    await talk.act(new)


@case(
    "capacity.full",
    CAPACITY,
    "The server holds capacity tasks, also with many starts at once; one more is 429 capacity.",
)
async def full(talk: Talk) -> None:
    """A start that is known is still answered, and a place that was freed is taken again."""
    health = await talk.health()
    if health.tasks:
        raise Skipped(f"the server holds {health.tasks} tasks of others")
    if health.capacity > talk.plan.max_tasks:
        words = f"start it with at most {talk.plan.max_tasks}, or raise --max-tasks"
        raise Skipped(f"filling {health.capacity} places takes long: {words}")
    bodies = [talk.start_body() for _ in range(health.capacity + _MORE_THAN_FIT)]
    answers = await asyncio.gather(*(talk.send("POST", "/start", body) for body in bodies))
    tasks: list[Task] = []
    known = bodies[0]
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status == 201:
            tasks.append(talk.begun(body, answer))
            known = body
        else:
            _full(answer)
    if len(tasks) != health.capacity:
        words = f"{len(bodies)} starts at once took {len(tasks)} places, capacity is {health.capacity}"
        raise Failed(words)
    _full(await talk.send("POST", "/start", talk.start_body()))
    same((await talk.send("POST", "/start", known)).data, tasks[-1].started, "a known start of a full server")
    higher = known | {"attempt": 1}
    tasks[-1] = talk.begun(higher, await talk.send("POST", "/start", higher))  # in the place of the older attempt
    await talk.end(tasks[0])
    await talk.start()


def _full(answer: Answer) -> None:
    refused(answer, "capacity")
    retry_after_s = answer.fields.get("retry_after_s")
    if "retry-after" not in answer.response.headers or not isinstance(retry_after_s, int | float):
        raise Failed(f"{answer.call}: 429 without the header Retry-After, or without retry_after_s")


CASES = (answer_of_start, optional, repeat, join, key_conflict, keys, attempt, full)
