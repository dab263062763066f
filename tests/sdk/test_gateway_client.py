"""The gateway client: typed answers, and retries that cannot act twice."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk import codec
from tide_sdk.asgi import send_problem
from tide_sdk.client import GatewayClient
from tide_sdk.errors import TideError
from tide_sdk.http import ConnectFailed, DeadlineExceeded, Disconnected, ProtocolFailed, QueueFull
from tide_sdk.http_parse import Response
from tide_sdk.retries import Backoff, place_wait_s
from tide_sdk.server import EnvironmentServer
from tide_sdk.wire import CapacityView, Message

EPOCH = {"state": "paused", "epoch": 1, "clocks": {}}
STARTED = {"task_id": "t", "turn": 0, "messages": [], "tools": [], "limits": {}, "clocks": {}}
SEEN = {"turn": 1, "messages": [], "reward": None, "terminated": False, "truncated": False, "info": {}, "clocks": {}}


class Scripted:
    """Answers as scripted: an exception, or (status, body[, headers]); the last one for ever."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.timeouts: list[float] = []
        self.paths: list[str] = []
        self.bodies: list[bytes | None] = []

    async def request(self, method, path, body=None, *, headers=None, timeout_s=None, idempotent=False):
        self.timeouts.append(timeout_s)
        self.paths.append(path)
        self.bodies.append(body)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        status, payload, *rest = answer
        return Response(status, rest[0] if rest else {}, codec.dumps(payload))

    async def aclose(self):
        pass


@pytest.fixture
def gateway(clock):
    def make(*script, **options):
        http = Scripted(*script)
        client = GatewayClient("http://g", http=http, now=clock, sleep=clock.sleep, jitter=lambda: 1.0, **options)
        return client, http

    return make


def problem(code, **extra):
    error = TideError(code, "why", **extra)
    return error.status, error.problem().model_dump()


WAITABLE = [
    Disconnected("x"),
    DeadlineExceeded("x"),
    ConnectFailed("x"),
    QueueFull("x"),
    ProtocolFailed("x"),
    problem("unavailable"),
    problem("capacity"),
    problem("paused"),
    (502, "a proxy's page"),
    (503, {"detail": "draining"}),
]


@pytest.mark.parametrize("failure", WAITABLE)
async def test_an_idempotent_call_is_made_again_with_growing_waits(gateway, clock, failure):
    client, http = gateway(failure, failure, failure, (200, SEEN))
    assert (await client.observe("t", 0, {"role": "assistant", "content": "x"})).turn == 1
    assert clock.sleeps == [0.1, 0.2, 0.4]
    assert len(http.timeouts) == 4


@pytest.mark.parametrize(
    "failure",
    [
        problem(code)
        for code in ("turn_conflict", "turn_order", "stale_attempt", "expired", "ended", "invalid", "not_found")
    ]
    + [
        problem(code) for code in ("environment_failed", "environment_lost", "turn_expired", "internal", "unauthorized")
    ],
)
async def test_a_final_answer_is_raised_at_once(gateway, clock, failure):
    client, http = gateway(failure)
    with pytest.raises(TideError) as caught:
        await client.observe("t", 0, {"role": "assistant"})
    assert caught.value.status == failure[0]
    assert len(http.timeouts) == 1


@pytest.mark.parametrize("failure", [Disconnected("x"), DeadlineExceeded("x"), (502, "x")])
async def test_a_pause_without_epoch_is_not_repeated_when_it_may_have_acted(gateway, failure):
    client, http = gateway(failure, (200, EPOCH))
    with pytest.raises((type(failure), TideError) if isinstance(failure, Exception) else TideError):
        await client.pause("t")
    assert len(http.timeouts) == 1
    client, http = gateway(failure, (200, EPOCH))
    assert (await client.pause("t", epoch=1)).epoch == 1


@pytest.mark.parametrize("failure", [ConnectFailed("x"), problem("unavailable")])
async def test_a_pause_without_epoch_is_repeated_when_it_cannot_have_acted(gateway, failure):
    client, _ = gateway(failure, (200, EPOCH))
    assert (await client.resume("t")).state == "paused"


async def test_retry_after_is_honoured_and_the_whole_call_has_a_deadline(gateway, clock):
    status, body = problem("capacity")
    client, http = gateway((status, body, {"retry-after": "7"}), deadline_s=30)
    with pytest.raises(TideError, match="capacity") as caught:
        await client.start("e", "k")
    assert clock.sleeps == [7, 7, 7, 7]
    assert "given up after 5 tries" in caught.value.__notes__[0]
    assert http.timeouts == [30, 23, 16, 9, 2]


async def test_a_place_in_the_queue_is_called_for_when_told_and_not_later(gateway, clock):
    """The waits do not grow: the gateway gives the place to the next one soon after the time that it named."""
    client, _ = gateway(*[problem("capacity", retry_after_s=0.7)] * 9, (201, STARTED))
    assert (await client.start("e", "k")).task_id == "t"
    assert clock.sleeps == pytest.approx([0.77] * 9)


async def test_the_header_is_never_earlier_than_the_body():
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    await send_problem(send, TideError("capacity", "why", retry_after_s=1.2))
    assert dict(sent[0]["headers"])[b"retry-after"] == b"2"


@pytest.mark.parametrize("told", [0, -1, float("nan"), 1e9, "7", True, None])
def test_a_time_that_makes_no_sense_is_not_waited_for(told):
    assert place_wait_s(TideError("capacity", "why", retry_after_s=told), 1.0) is None
    assert place_wait_s(TideError("unavailable", "why", retry_after_s=1), 1.0) is None
    assert place_wait_s(TideError("capacity", "why", retry_after_s=1e-9), 0.0) == 0.01


@pytest.mark.parametrize("timeout_s", [40, None])
async def test_a_heartbeat_is_sent_again_until_it_is_answered(gateway, clock, timeout_s):
    client, http = gateway(Disconnected("x"), (502, "x"), (200, {"owner_tasks": 3, "timeout_s": timeout_s}))
    answer = await client.heartbeat("run/", timeout_s, deadline_s=9)
    assert (answer.owner_tasks, answer.timeout_s) == (3, timeout_s)
    assert http.paths == ["/heartbeat"] * 3
    assert [codec.loads(body) for body in http.bodies] == [{"prefix": "run/", "timeout_s": timeout_s}] * 3
    assert http.timeouts[0] == 9


@pytest.mark.parametrize(("prefix", "timeout_s"), [("x" * 513, 1), ("", 0), ("", 86_401), ("", float("inf"))])
async def test_a_heartbeat_outside_the_contract_is_refused_before_it_is_sent(gateway, prefix, timeout_s):
    client, http = gateway((200, {}))
    with pytest.raises(TideError, match="timeout_s" if not prefix else "prefix"):
        await client.heartbeat(prefix, timeout_s)
    assert http.paths == []


async def test_a_paused_task_is_waited_for_and_never_resumed(asgi, guess_class, clock):
    http = asgi(EnvironmentServer(guess_class, now=clock))

    async def sleep(seconds):
        await clock.sleep(seconds)
        if len(clock.sleeps) == 5:
            await http.call("POST", "/resume", {"task_id": started.task_id})

    client = GatewayClient("http://g", http=http, now=clock, sleep=sleep)
    started = await client.start("guess", "k", seed=1)
    await client.pause(started.task_id)
    http.calls.clear()
    observation = await client.observe(started.task_id, 0, {"role": "assistant", "content": "3"})
    assert observation.terminated
    assert [path for _, path, _ in http.calls] == ["/observation"] * 5 + ["/resume", "/observation"]


async def test_the_whole_contract_is_typed(asgi, guess_class):
    async with GatewayClient("http://g", http=asgi(EnvironmentServer(guess_class))) as client:
        started = await client.start(
            "guess", "a/b", task={"x": 1}, seed=1, split="test", kind="eval", limits={"idle": 9}
        )
        assert started.limits["idle"] == 9
        assert (await client.observation(started.task_id)).turn == 0
        said = Message(role="assistant", content="0")
        assert (await client.observe(started.task_id, 0, said)).reward == 0.0
        assert (await client.pause(started.task_id, epoch=3)).state == "paused"
        assert (await client.resume(started.task_id, epoch=4)).state == "waiting"
        assert (await client.end(started.task_id, "x" * 5000)).outcome.kind == "aborted"
        with pytest.raises(TideError, match="seed"):
            await client.start("guess", "k", seed=-1)


async def test_tasks_and_views_are_read(gateway):
    view = {
        "task_id": "t", "environment": "e", "key": "k", "attempt": 0, "kind": "train", "state": "waiting",
        "turn": 0, "epoch": 0, "reward": None, "outcome": None, "clocks": {}, "created_at": "2024-01-01T00:00:00Z",
    }  # fmt: skip
    pages = [{"tasks": [view | {"task_id": "u"}], "next": "u"}, {"tasks": [view], "next": None}]
    free = {"capacity": 4, "taken": 1, "free": 2, "free_eval": 3, "mine": 1, "waiting": 0, "starts_per_s": 0.0}
    client, http = gateway(*((200, page) for page in pages), (200, view), (200, {"e": free}))
    assert [task.task_id for task in await client.tasks()] == ["u", "t"]
    assert http.paths == ["/tasks?limit=500", "/tasks?limit=500&after=u"]
    assert (await client.task("t")).state == "waiting"
    assert await client.capacity() == {"e": CapacityView(**free)}


async def test_an_answer_outside_the_contract_is_named(gateway):
    client, _ = gateway((200, {"turn": "first"}))
    with pytest.raises(ProtocolFailed, match="outside the contract"):
        await client.observe("t", 0, {"role": "assistant"})


async def test_a_token_is_sent_and_not_shown(socket_server, read_request):
    heads = []

    async def handler(reader, writer):
        heads.append((await read_request(reader))[0])
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}")

    async with socket_server(handler) as url, GatewayClient(url, token="s3cret") as client:
        with pytest.raises(TideError) as caught:
            await client.healthz()
    assert b"\r\nAuthorization: Bearer s3cret\r\n" in heads[0]
    assert b"\r\nTide-Contract: 1\r\n" in heads[0]
    assert "s3cret" not in f"{caught.value!r}{vars(client)['url']}"


async def test_https_goes_through_httpx(socket_server):
    async def handler(reader, writer):
        await reader.read(100)

    async with socket_server(handler) as url:
        client = GatewayClient(url.replace("http:", "https:"), deadline_s=0.05)
        with pytest.raises((ConnectFailed, Disconnected, DeadlineExceeded)):
            await client.healthz()
        await client.aclose()


def test_backoff_is_bounded_and_jittered():
    backoff = Backoff(first_s=1, factor=2, max_s=8)
    assert [backoff.wait_s(number, 1.0) for number in (1, 2, 3, 4, 5, 500)] == [1, 2, 4, 8, 8, 8]
    assert backoff.wait_s(3, 0.0) == 2
    assert backoff.wait_s(1, 0.0, asked_s=60) == 60


async def test_a_cancelled_call_stops_waiting(gateway):
    client, _ = gateway(problem("paused"))
    client._sleep = asyncio.sleep
    call = asyncio.create_task(client.observe("t", 0, {"role": "assistant"}))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_start_that_must_not_wait_for_a_place_fails_at_once_and_says_when_to_come_back(gateway, clock):
    refused = problem("capacity", reason="rate", retry_after_s=2.5)
    client, http = gateway(refused, (201, STARTED))
    with pytest.raises(TideError) as caught:
        await client.start("maze", "k", waits_for_place=False)
    assert caught.value.extra["retry_after_s"] == 2.5
    assert len(http.paths) == 1
    assert (await client.start("maze", "k", waits_for_place=False)).task_id == "t"


@pytest.mark.parametrize("reason", ["calls", "memory"])
async def test_a_busy_gateway_is_no_gateway_without_a_place(gateway, clock, reason):
    client, http = gateway(problem("capacity", reason=reason, retry_after_s=1), (201, STARTED))
    assert (await client.start("maze", "k", waits_for_place=False)).task_id == "t"
    assert len(http.paths) == 2
