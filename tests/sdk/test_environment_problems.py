"""Every refusal of the environment server is problem+json that names what is wrong; so is every author's failure."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk.environment import EndInfo, Environment, Start, Step
from tide_sdk.server import EnvironmentServer
from tide_sdk.wire import Problem

START = b'{"environment":"any","key":"k"}'


@pytest.fixture
def client(asgi, guess_class):
    return asgi(EnvironmentServer(guess_class, max_body_bytes=500))


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("POST", "/start", b"{", None, 422, "body: not valid JSON"),
        ("POST", "/start", b'{"environment":"a","key":NaN}', None, 422, "body: not valid JSON"),
        ("POST", "/start", b"[]", None, 422, "body: "),
        ("POST", "/start", b'{"environment":"a"}', None, 422, "key: Field required"),
        ("POST", "/start", b'{"environment":"a","key":"k","sed":1}', None, 422, "sed: unknown field"),
        ("POST", "/start", b'{"environment":"a","key":"k","seed":-1}', None, 422, "seed: "),
        ("POST", "/start", b'{"environment":"a","key":"k","limits":{"idle":0}}', None, 422, "limits.idle: "),
        ("POST", "/start", b'{"environment":"a","key":"k","limits":{"nap":1}}', None, 422, "limits.nap"),
        ("POST", "/start", START, {"content-type": "text/plain"}, 415, "Content-Type: application/json"),
        ("POST", "/start", START, {"tide-contract": "2"}, 422, "Tide-Contract"),
        ("POST", "/start", b" " * 501, None, 413, "at most 500 bytes"),
        ("POST", "/start", b"{}", {"content-length": "501"}, 413, "at most 500 bytes"),
        ("PUT", "/start", START, None, 405, "/start takes POST"),
        ("POST", "/health", b"{}", None, 405, "/health takes GET"),
        ("GET", "/nowhere", None, None, 404, "no endpoint '/nowhere'"),
        ("GET", "/observation", None, None, 422, "task_id: give it once"),
        ("GET", "/observation?task_id=a&task_id=b", None, None, 422, "task_id: give it once"),
        ("GET", "/observation?task_id=a", None, None, 404, "task_id"),
        ("POST", "/end", b'{"task_id":"a"}', None, 404, "task_id"),
        ("POST", "/pause", b'{"task_id":"a","epoch":0}', None, 422, "epoch: "),
        ("POST", "/observation", b'{"task_id":"a","turn":0,"message":{"role":"me"}}', None, 422, "message.role: "),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(client, method, path, body, headers, status, words):
    response = await client.request(method, path, body, headers=headers)
    problem = Problem.model_validate_json(response.body)
    assert (response.status, problem.status) == (status, status)
    assert words in problem.detail
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["tide-contract"] == "1"
    assert problem.type == f"urn:tide:problem:{problem.code}"
    assert (response.headers.get("allow") is not None) == (status == 405)


async def test_a_body_in_pieces_is_put_together_and_bounded(client):
    async def call(pieces):
        events = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        events.append({"type": "http.request", "body": b"", "more_body": False})
        sent = []

        async def receive():
            return events.pop(0)

        async def send(event):
            sent.append(event)

        headers = [(b"content-type", b"application/json; charset=utf-8")]
        await client.app(
            {"type": "http", "method": "POST", "path": "/start", "query_string": b"", "headers": headers}, receive, send
        )
        return sent[0]["status"], len(events)

    assert await call([START[:9], START[9:]]) == (201, 0)
    assert await call([b" " * 300] * 5) == (413, 4)  # the rest is not even read


async def test_a_caller_that_goes_away_while_it_sends_is_let_go(client):
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(event):
        sent.append(event)

    headers = [(b"content-type", b"application/json")]
    await client.app(
        {"type": "http", "method": "POST", "path": "/start", "query_string": b"", "headers": headers}, receive, send
    )
    assert sent == []


class Panic(BaseException):
    """As native libraries raise."""


class Silent(Exception):
    def __str__(self):
        raise ValueError("no words")


class Fails(Environment):
    """Fails where its task says so."""

    blocking = False

    def start(self, task):
        self.how = task.task
        if "start" in self.how:
            return {
                "raise": self.boom,
                "type": lambda: None,
                "message": lambda: Start([{"role": "user", "content": 3}]),
            }[self.how["start"]]()
        return Start("go")

    def step(self, message):
        how = self.how.get("step")
        answers = {
            "type": lambda: "a string",
            "reward": lambda: Step("x", reward=float("nan")),
            "info": lambda: Step("x", info={"a": {1, 2}}),
            "nan": lambda: Step("x", info={"a": float("inf")}),
            "message": lambda: Step([{"content": "no role"}]),
            "exit": lambda: exit(3),
            "panic": lambda: self.raises(Panic("native")),
            "cancelled": lambda: self.raises(asyncio.CancelledError),
            "silent": lambda: self.raises(Silent),
            "huge reward": lambda: Step("x", reward=10**400),
            "generator": lambda: Step(self.boom() for _ in range(1)),
        }
        return answers.get(how, self.boom)()

    def end(self, reason):
        unsendable = {"reward": float("inf"), "words": "much", "huge": 10**400}
        if self.how.get("end") in unsendable:
            return EndInfo(reward=unsendable[self.how["end"]])
        if self.how.get("end") == "cancelled":
            raise asyncio.CancelledError
        if "end" in self.how:
            self.boom()
        return None

    def pause(self):
        self.boom()

    def raises(self, error):
        raise error

    def boom(self):
        raise ZeroDivisionError("by the author")


class AsyncFails(Fails):
    async def start(self, task):
        if task.task.get("start") == "cancelled":
            raise asyncio.CancelledError
        if task.task.get("start") == "exit":
            raise SystemExit(3)
        return Fails.start(self, task)

    async def step(self, message):
        return Fails.step(self, message)

    async def end(self, reason):
        return Fails.end(self, reason)


async def start(client, key="k", **task):
    return await client.call("POST", "/start", {"environment": "any", "key": key, "task": task})


def say(task_id):
    return {"task_id": task_id, "turn": 0, "message": {"role": "assistant", "content": "x"}}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "ZeroDivisionError: by the author"),
        ("type", "expected Start, got NoneType"),
        ("message", "not an OpenAI chat message"),
    ],
)
async def test_a_failed_start_names_the_method_and_may_be_tried_again(asgi, how, words):
    client = asgi(EnvironmentServer(Fails, capacity=1))
    status, body = await start(client, start=how)
    assert (status, body["code"], body["method"]) == (502, "environment_failed", "Fails.start")
    assert words in body["detail"]
    assert (await start(client))[0] == 201


@pytest.mark.parametrize(("how", "words"), [("cancelled", "CancelledError"), ("exit", "SystemExit: 3")])
async def test_an_async_start_that_exits_or_is_cancelled_fails_and_frees_its_place(asgi, how, words):
    client = asgi(EnvironmentServer(AsyncFails, capacity=1))
    status, body = await start(client, start=how)
    assert (status, body["code"]) == (502, "environment_failed")
    assert words in body["detail"]
    assert (await start(client))[0] == 201


@pytest.mark.parametrize("kind", [Fails, type("Fails", (Fails,), {"blocking": True}), type("Fails", (AsyncFails,), {})])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "ZeroDivisionError: by the author"),
        ("type", "expected Step, got str"),
        ("reward", "reward is nan"),
        ("info", "its Step cannot be sent"),
        ("nan", "its Step cannot be sent"),
        ("message", "not an OpenAI chat message"),
        ("exit", "SystemExit: 3"),
        ("panic", "Panic: native"),
        ("cancelled", "CancelledError"),
        ("silent", "Silent, whose __str__ raised ValueError"),
        ("huge reward", "OverflowError"),
        ("generator", "ZeroDivisionError"),
    ],
)
async def test_a_failed_step_fails_the_task_and_answers_a_repeat_the_same(asgi, how, words, kind):
    client = asgi(EnvironmentServer(kind))
    task_id = (await start(client, step=how))[1]["task_id"]
    status, body = await client.call("POST", "/observation", say(task_id))
    assert (status, body["code"], body["method"]) == (502, "environment_failed", "Fails.step")
    assert words in body["detail"]
    assert await client.call("POST", "/observation", say(task_id)) == (status, body)
    account = (await client.call("POST", "/end", {"task_id": task_id}))[1]
    assert (account["reward"], account["outcome"]["kind"]) == (None, "failed")
    assert words in account["outcome"]["reason"]


@pytest.mark.parametrize("kind", [Fails, AsyncFails])
@pytest.mark.parametrize("how", ["raise", "reward", "words", "huge", "cancelled"])
async def test_a_failed_end_leaves_no_reward(asgi, how, kind):
    client = asgi(EnvironmentServer(kind))
    task_id = (await start(client, end=how))[1]["task_id"]
    account = (await client.call("POST", "/end", {"task_id": task_id}))[1]
    assert (account["reward"], account["outcome"]["kind"]) == (None, "failed")


async def test_a_failed_pause_is_told_but_the_clocks_stand_still(asgi, clock):
    client = asgi(EnvironmentServer(Fails, now=clock))
    task_id = (await start(client))[1]["task_id"]
    status, body = await client.call("POST", "/pause", {"task_id": task_id, "epoch": 1})
    assert (status, body["code"]) == (502, "environment_failed")
    clock.now_s += 1e6
    client.app.sweep()
    status, body = await client.call("POST", "/pause", {"task_id": task_id, "epoch": 1})
    assert (status, body["state"]) == (200, "paused")


async def test_a_stopping_server_ends_its_tasks(asgi, gated_class):
    server = EnvironmentServer(gated_class)
    await start(asgi(server))
    events = asyncio.Queue()
    sent = []

    async def send(event):
        sent.append(event["type"])

    for name in ("lifespan.startup", "lifespan.shutdown"):
        events.put_nowait({"type": name})
    await server({"type": "lifespan"}, events.get, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert gated_class.log == ["start", "end the server stops"]
