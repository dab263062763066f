"""Streams follow the capture: kept alive while held, never lost or doubled, and bounded on the way out."""

from __future__ import annotations

import asyncio
import json

import pytest

from tide_trainer.router import outlet
from tide_trainer.router.state import Limits

CHAT = "/sessions/s/v1/chat/completions"
FRESH = {"x-stainless-retry-count": "0"}
RETRY = {"x-stainless-retry-count": "1"}


class Client:
    """An ASGI client that leaves or stalls when it is told to."""

    def __init__(self, router) -> None:
        self.router = router
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self.leaves_at = 10**9
        self.stalled = False

    async def ask(self, text: str = "you", headers=FRESH, **options) -> None:
        body = {"messages": [{"role": "user", "content": text}], "stream": True, **options}
        pairs = {"content-type": "application/json", "authorization": "Bearer key-of-s", **headers}
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
        }
        requests = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive():
            for message in requests:
                return message
            await self.gone.wait()
            return {"type": "http.disconnect"}

        await asyncio.wait_for(self.router.app(scope, receive, self.send), 30)

    async def send(self, message) -> None:
        self.sent.append(message)
        if len(self.sent) >= self.leaves_at:
            self.gone.set()
            await asyncio.sleep(0)
        if self.stalled:
            await asyncio.Event().wait()

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


@pytest.fixture
def live(router):
    long = [*router.renderer.encode("see a red ball " * 2000), *router.renderer.stop_token_ids]
    router.engine(lambda _: long)
    router.open(max_context_tokens=100_000, max_new_tokens=50_000)
    router.app._model_calls._limits = Limits(keep_alive_s=0.01)
    return router


async def held(router, count=1):
    async with asyncio.timeout(10):
        while router.calls.num_held < count:  # noqa: ASYNC110 - the router sets no event for a test
            await asyncio.sleep(0)


async def test_nothing_but_comments_goes_out_while_the_call_is_held(live):
    live.auto_rank = None
    client = Client(live)
    request = asyncio.create_task(client.ask())
    await held(live)
    async with asyncio.timeout(10):
        while len(client.sent) < 4:  # noqa: ASYNC110 - the router sets no event for a test
            await asyncio.sleep(0.001)
    assert client.sent[0]["status"] == 200
    assert set(client.body.split(b"\n\n")) == {b": held", b""}
    assert live.names() == ["call"]
    live.grant(live.events[0][1]["call"], "r0")
    await request
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert live.names() == ["call", "turn"]
    assert client.sent[-1]["more_body"] is False


async def test_a_stream_goes_out_in_bounded_pieces(live):
    client = Client(live)
    await client.ask(logprobs=True)
    sizes = [len(message["body"]) for message in client.sent[1:]]
    assert sum(sizes) > 20 * outlet.MAX_SEND_BYTES
    assert max(sizes) < 2 * outlet.MAX_SEND_BYTES


async def test_a_client_that_leaves_while_held_cancels_its_call(live):
    live.auto_rank = None
    client = Client(live)
    request = asyncio.create_task(client.ask())
    await held(live)
    await asyncio.sleep(0.05)
    client.gone.set()
    await request
    await asyncio.sleep(0)
    assert live.names() == ["call", "call_cancelled"]
    assert live.control.close({"session": "s"})["segments"] == []


@pytest.mark.parametrize("headers", [FRESH, RETRY])
async def test_a_client_that_leaves_in_the_middle_gets_the_same_turn_again(headers, live):
    client = Client(live)
    client.leaves_at = 3
    await client.ask(logprobs=True)
    assert not client.body.endswith(b"[DONE]\n\n")
    again = Client(live)
    await again.ask(logprobs=True, headers=headers)
    assert again.body.startswith(client.body)
    assert again.body.endswith(b"data: [DONE]\n\n")
    assert len(live.engines["r0"].sent) == 1
    third = Client(live)
    await third.ask(logprobs=True)  # what has arrived is not given to a new call
    assert len(live.engines["r0"].sent) == 2
    assert live.control.close({"session": "s"})["num_calls"] == 2


async def test_a_client_that_reads_nothing_is_given_up(live, monkeypatch):
    monkeypatch.setattr(outlet, "SEND_LIMIT_S", 0.02)
    client = Client(live)
    client.stalled = True
    await client.ask()
    assert len(client.sent) == 1
    assert live.control.close({"session": "s"})["num_calls"] == 1


async def test_a_retry_joins_the_call_that_is_still_in_flight(live):
    live.auto_rank = None
    first, second = Client(live), Client(live)
    requests = [asyncio.create_task(first.ask())]
    await held(live)
    requests.append(asyncio.create_task(second.ask(headers=RETRY)))
    await asyncio.sleep(0.03)
    first.gone.set()
    await requests[0]
    live.grant(live.events[0][1]["call"], "r0")
    await requests[1]
    assert second.body.endswith(b"data: [DONE]\n\n")
    assert live.names() == ["call", "turn"]


async def test_a_failure_behind_the_head_is_an_event(live):
    live.auto_rank = None
    client = Client(live)
    request = asyncio.create_task(client.ask())
    await held(live)
    await asyncio.sleep(0.05)
    live.control.close({"session": "s"})
    await request
    last = json.loads(client.body.rpartition(b"data: ")[2])
    assert last["error"]["code"] == "session_ended"
    assert client.sent[-1]["more_body"] is False


async def test_an_evaluation_samples_at_the_run_s_temperature(live):
    live.open("e", kind="eval")
    status, body = await live.call(
        "POST",
        "/sessions/e/v1/chat/completions",
        {"messages": [{"role": "user", "content": "you"}], "temperature": 0.3, "max_tokens": 9},
        key="key-of-e",
    )
    assert status == 200, body
    assert live.engines["r0"].samplings[-1].temperature == 1.0


async def test_s5_temperature_zero_is_refused_in_training_with_the_reason(live):
    for temperature in (0, 0.0, 0.7):
        status, answer = await live.chat([{"role": "user", "content": "you"}], temperature=temperature)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_value", "temperature")
        assert "cannot be trained" in answer["error"]["message"]
    assert live.events == []


async def test_ignored_fields_are_named_but_never_break_the_head(live):
    client = Client(live)
    await client.ask(user="me", reasoning_effort="low", **{"a\r\nset-cookie: b": 1, "ü": 2, "temperature": 1})
    head = dict(client.sent[0]["headers"])
    assert head[b"tide-ignored"] == b"reasoning_effort, user"


@pytest.mark.parametrize(("template", "role"), [("chatml", "system"), ("developer", "developer")])
async def test_the_developer_role_is_the_template_s_own_or_system(template, role, live, renderers):
    live.renderer.knows_developer = template == "developer"
    try:
        await live.chat([{"role": "developer", "content": "be brief"}, {"role": "user", "content": "you"}])
    finally:
        live.renderer.knows_developer = False
    assert f"<|im_start|>{role}\nbe brief" in live.renderer.decode_after(live.engines["r0"].sent[-1])
