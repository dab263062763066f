"""The environment server speaks the contract: starts, turns, pauses, ends, on a manual clock."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tide_sdk.environment import Environment, Start, Step
from tide_sdk.errors import TideError
from tide_sdk.server import EnvironmentServer
from tide_sdk.wire import EndResponse, EpochResponse, HealthResponse, ObservationResponse, StartResponse


def start_body(key="k", **fields):
    return {"environment": "any", "key": key, "seed": 1, **fields}


def say(task_id, turn, text):
    return {"task_id": task_id, "turn": turn, "message": {"role": "assistant", "content": text}}


@pytest.fixture
def guess(asgi, guess_class, clock):
    return asgi(EnvironmentServer(guess_class, now=clock))


@pytest.fixture
def gated(asgi, gated_class, clock):
    return asgi(EnvironmentServer(gated_class, now=clock))


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.001)


async def begin(client, **fields):
    status, body = await client.call("POST", "/start", start_body(**fields))
    assert status == 201, body
    return body


async def test_an_episode_from_start_to_end(guess):
    started = StartResponse.model_validate(await begin(guess, limits={"idle": 7}))
    assert (started.turn, started.messages[0].text, len(started.tools)) == (0, "Guess my number.", 1)
    assert started.limits["idle"] == 7
    assert started.clocks["idle"].remaining_s == 7
    status, body = await guess.call("POST", "/observation", say(started.task_id, 0, "0"))
    first = ObservationResponse.model_validate(body)
    assert (status, first.turn, first.reward, first.terminated, first.truncated) == (200, 1, 0.0, False, False)
    status, body = await guess.call("POST", "/observation", say(started.task_id, 1, "3"))
    last = ObservationResponse.model_validate(body)
    assert (last.messages[0].text, last.reward, last.terminated) == ("Right.", 1.0, True)
    status, body = await guess.call("POST", "/observation", say(started.task_id, 2, "3"))
    assert (status, body["code"]) == (409, "state_conflict")
    assert (await guess.call("GET", f"/observation?task_id={started.task_id}"))[0] == 200
    status, body = await guess.call("POST", "/end", {"task_id": started.task_id})
    account = EndResponse.model_validate(body)
    assert (status, account.reward, account.turns, account.outcome.kind) == (200, 1.0, 2, "completed")
    assert await guess.call("POST", "/end", {"task_id": started.task_id, "reason": "late"}) == (200, body)
    status, body = await guess.call("GET", f"/observation?task_id={started.task_id}")
    assert (status, body["code"]) == (410, "ended")


async def test_a_repeated_turn_is_answered_from_the_record_in_every_state(guess):
    task_id = (await begin(guess))["task_id"]
    first = await guess.call("POST", "/observation", say(task_id, 0, "0"))
    assert first[1]["info"] == {"taken": ["0"]}
    reordered = {"message": {"content": "0", "role": "assistant"}, "turn": 0, "task_id": task_id}
    await guess.call("POST", "/pause", {"task_id": task_id})
    assert await guess.call("POST", "/observation", reordered) == first
    await guess.call("POST", "/end", {"task_id": task_id})
    assert await guess.call("POST", "/observation", reordered) == first
    status, body = await guess.call("POST", "/observation", say(task_id, 0, "other"))
    assert (status, body["code"]) == (409, "turn_conflict")


async def test_only_an_assistant_acts(guess):
    action = say((await begin(guess))["task_id"], 0, "5")
    for role in ("user", "tool", "system"):
        body = action | {"message": {"role": role, "content": "5"}}
        status, problem = await guess.call("POST", "/observation", body)
        assert (status, problem["code"], problem["field"]) == (422, "invalid", "message.role")
    status, answer = await guess.call("POST", "/observation", action)
    assert (status, answer["info"]) == (200, {"taken": ["5"]})


async def test_a_turn_under_way_is_joined_and_no_other_runs_beside_it(gated, gated_class):
    task_id = (await begin(gated))["task_id"]
    calls = [asyncio.create_task(gated.call("POST", "/observation", say(task_id, 0, "a"))) for _ in range(3)]
    await asyncio.sleep(0)
    assert (await gated.call("POST", "/observation", say(task_id, 0, "b")))[1]["code"] == "turn_conflict"
    assert (await gated.call("POST", "/observation", say(task_id, 1, "b")))[1]["code"] == "turn_order"
    calls[0].cancel()  # a caller that goes away does not stop the action
    await asyncio.sleep(0)
    gated_class.gate.set()
    answers = await asyncio.gather(*calls[1:])
    assert answers[0] == answers[1]
    assert answers[0][1]["turn"] == 1
    assert gated_class.log == ["start", "step a"]


async def test_a_start_is_joined_by_its_key_and_answered_the_same(gated, gated_class):
    answers = await asyncio.gather(*(gated.call("POST", "/start", start_body()) for _ in range(3)))
    assert answers[0][0] == 201
    assert answers[0] == answers[1] == answers[2]
    assert gated_class.log == ["start"]
    status, body = await gated.call("POST", "/start", start_body(seed=2))
    assert (status, body["code"], body["field"]) == (409, "key_conflict", "key")


async def test_a_higher_attempt_ends_the_older_one(gated, gated_class):
    old = (await begin(gated))["task_id"]
    acting = asyncio.create_task(gated.call("POST", "/observation", say(old, 0, "a")))
    await asyncio.sleep(0)
    new = (await begin(gated, attempt=2))["task_id"]
    assert new != old
    assert (await acting)[1]["code"] == "ended"
    assert (await gated.call("POST", "/observation", say(old, 1, "b")))[1]["code"] == "stale_attempt"
    assert (await gated.call("POST", "/start", start_body(attempt=1)))[1]["code"] == "stale_attempt"
    assert gated_class.log[-2:] == ["end superseded", "start"]
    account = (await gated.call("POST", "/end", {"task_id": old}))[1]
    assert account["outcome"] == {"kind": "aborted", "clock": None, "reason": "superseded"}


async def test_capacity_is_kept_and_freed_by_the_end_of_the_episode(guess):
    tasks = [(await begin(guess, key=f"k{number}"))["task_id"] for number in range(4)]
    refused = await guess.request("POST", "/start", b'{"environment":"any","key":"k9"}')
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert (await begin(guess, key="k1"))["task_id"] == tasks[1]
    await guess.call("POST", "/observation", say(tasks[0], 0, "3"))  # a hit: the environment has ended the task
    await asyncio.sleep(0)
    await begin(guess, key="k9")
    health = HealthResponse.model_validate((await guess.call("GET", "/health"))[1])
    assert (health.environment, health.capacity, health.tasks, health.contract) == ("guess", 4, 4, 1)


async def test_released_tasks_are_remembered_up_to_a_bound(asgi, guess_class):
    client = asgi(EnvironmentServer(guess_class, max_remembered=2))
    tasks = [(await begin(client, key=f"k{number}"))["task_id"] for number in range(3)]
    for task_id in tasks:
        assert (await client.call("POST", "/end", {"task_id": task_id}))[0] == 200
    states = [(await client.call("POST", "/end", {"task_id": task_id}))[0] for task_id in tasks]
    assert states == [404, 200, 200]


async def test_no_clock_of_a_paused_task_moves(guess, clock):
    task_id = (await begin(guess, limits={"idle": 10, "active": 100}))["task_id"]
    clock.now_s += 4
    status, body = await guess.call("POST", "/pause", {"task_id": task_id, "epoch": 1})
    paused = EpochResponse.model_validate(body)
    assert (status, paused.state, paused.epoch) == (200, "paused", 1)
    clock.now_s += 1e6
    guess.app.sweep()
    status, refused = await guess.call("POST", "/observation", say(task_id, 0, "0"))
    assert (status, refused["code"]) == (423, "paused")
    assert (await guess.call("GET", f"/observation?task_id={task_id}"))[0] == 200
    again = (await guess.call("POST", "/pause", {"task_id": task_id, "epoch": 1}))[1]
    assert again["clocks"] == body["clocks"]
    resumed = (await guess.call("POST", "/resume", {"task_id": task_id, "epoch": 2}))[1]
    assert resumed["state"] == "waiting"
    assert resumed["clocks"]["idle"] == {"limit_s": 10, "consumed_s": 4, "remaining_s": 6}
    late = (await guess.call("POST", "/pause", {"task_id": task_id, "epoch": 1}))[1]
    assert (late["state"], late["epoch"]) == ("waiting", 2)
    assert (await guess.call("POST", "/observation", say(task_id, 0, "0")))[0] == 200


async def test_a_pause_while_acting_takes_effect_at_the_end_of_the_action(gated, gated_class):
    task_id = (await begin(gated))["task_id"]
    acting = asyncio.create_task(gated.call("POST", "/observation", say(task_id, 0, "a")))
    await asyncio.sleep(0)
    assert (await gated.call("POST", "/pause", {"task_id": task_id}))[1]["state"] == "pausing"
    assert (await gated.call("POST", "/resume", {"task_id": task_id}))[1]["state"] == "acting"
    assert (await gated.call("POST", "/pause", {"task_id": task_id, "epoch": 1}))[1]["state"] == "pausing"
    gated_class.gate.set()
    assert (await acting)[0] == 200
    assert (await gated.call("POST", "/observation", say(task_id, 1, "b")))[0] == 423
    assert (await gated.call("POST", "/resume", {"task_id": task_id, "epoch": 2}))[1]["state"] == "waiting"
    await gated.call("POST", "/observation", say(task_id, 1, "b"))
    assert gated_class.log == ["start", "step a", "pause", "resume", "step b"]


@pytest.mark.parametrize(("name", "acting"), [("idle", False), ("active", False), ("active", True), ("turn", True)])
async def test_an_expired_clock_ends_the_task(gated, clock, name, acting):
    task_id = (await begin(gated, limits={name: 5}))["task_id"]
    call = asyncio.create_task(gated.call("POST", "/observation", say(task_id, 0, "a"))) if acting else None
    await asyncio.sleep(0)
    clock.now_s += 4.9
    gated.app.sweep()
    assert (await gated.call("GET", f"/observation?task_id={task_id}"))[0] == 200
    clock.now_s += 0.2
    gated.app.sweep()
    if call is not None:
        status, body = await call
        assert (status, body["clock"]) == ((504, "turn") if name == "turn" else (410, name))
    for turn in (0, 1):
        status, body = await gated.call("POST", "/observation", say(task_id, turn, "a"))
        assert (status, body["code"], body["clock"]) == (410, "expired", name)
    account = (await gated.call("POST", "/end", {"task_id": task_id}))[1]
    assert account["outcome"]["clock"] == name
    assert account["reward"] == (None if name == "turn" else 0.0)


async def test_the_start_clock_ends_a_start_that_hangs_and_frees_its_place(asgi):
    class Hangs(Environment):
        capacity = 1
        hang = True

        async def start(self, task):
            if Hangs.hang:
                await asyncio.Event().wait()
            return Start("ready")

    client = asgi(EnvironmentServer(Hangs))
    status, body = await client.call("POST", "/start", start_body(limits={"start": 0.01}))
    assert (status, body["code"], body["clock"]) == (410, "expired", "start")
    Hangs.hang = False
    assert (await client.call("POST", "/start", start_body()))[0] == 201


async def test_an_end_while_acting_answers_the_waiting_call_with_410(gated, gated_class):
    task_id = (await begin(gated))["task_id"]
    acting = asyncio.create_task(gated.call("POST", "/observation", say(task_id, 0, "a")))
    await until(lambda: "step a" in gated_class.log)
    status, account = await gated.call("POST", "/end", {"task_id": task_id, "reason": "enough"})
    assert (status, account["outcome"]["kind"], account["turns"]) == (200, "aborted", 0)
    assert account["metrics"] == {"calls": 3}
    assert (await acting)[0] == 410
    assert gated_class.log == ["start", "step a", "end enough"]


async def test_a_method_that_blocks_in_its_thread_is_abandoned_after_the_end_limit(asgi, guess_class):
    class Blocks(guess_class):
        blocking = True
        began = False

        def step(self, message):
            Blocks.began = True
            threading.Event().wait()

    client = asgi(EnvironmentServer(Blocks))
    task_id = (await begin(client, limits={"end": 0.05}))["task_id"]
    acting = asyncio.create_task(client.call("POST", "/observation", say(task_id, 0, "a")))
    await until(lambda: Blocks.began)
    status, account = await client.call("POST", "/end", {"task_id": task_id})
    assert (status, account["metrics"]) == (200, {"end_expired": True})
    assert (await acting)[0] == 410
    assert (await client.call("GET", "/health"))[1]["tasks"] == 0


async def test_plain_methods_of_an_instance_share_one_thread_off_the_loop(asgi):
    class Threads(Environment):
        def __init__(self):
            self.seen = [threading.current_thread()]

        def start(self, task):
            self.seen.append(threading.current_thread())
            return Start("go")

        def step(self, message):
            assert {*self.seen, threading.current_thread()} == {self.seen[0]}
            assert self.seen[0] is not threading.main_thread()
            return Step("ok")

    client = asgi(EnvironmentServer(Threads))
    task_id = (await begin(client))["task_id"]
    assert (await client.call("POST", "/observation", say(task_id, 0, "a")))[0] == 200


async def test_the_author_may_refuse_a_task_by_name(asgi, guess_class):
    class Picky(guess_class):
        def start(self, task):
            if "level" not in task.task:
                raise TideError("invalid", "task.level: name a level", field="task.level")
            return super().start(task)

    client = asgi(EnvironmentServer(Picky))
    status, body = await client.call("POST", "/start", start_body())
    assert (status, body["code"], body["field"]) == (422, "invalid", "task.level")
    assert (await client.call("POST", "/start", start_body(task={"level": 1})))[0] == 201
