"""Errors of other libraries' clients become the right outcome: real clients against a real, small server."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent as Framework
from pydantic_ai.exceptions import UserError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from tide_sdk.errors import TideError
from tide_sdk.outcomes import classify

OVERFLOW = {"error": {"message": "This model's maximum context length is 10 tokens.", "code": None, "type": "x"}}
ANSWERS = {
    "overflow code": (400, {"error": {"message": "long", "code": "context_length_exceeded", "type": "x"}}),
    "overflow words": (400, OVERFLOW),
    "bad request": (400, {"error": {"message": "temperature", "code": "invalid_value", "type": "x"}}),
    "unprocessable": (422, {"detail": "messages: missing"}),
    "filter": (400, {"error": {"message": "filtered", "code": "content_filter", "type": "x"}}),
    "key": (401, {"error": {"message": "no", "code": "invalid_api_key", "type": "x"}}),
    "model": (404, {"error": {"message": "no such model", "code": "model_not_found", "type": "x"}}),
    "rate": (429, {"error": {"message": "slow down", "code": "rate_limit_exceeded", "type": "x"}}),
    "broken": (500, {"error": {"message": "oops", "type": "x"}}),
}
OUTCOMES = {
    "overflow code": "context_overflow",
    "overflow words": "context_overflow",
    "bad request": "agent_error",
    "unprocessable": "agent_error",
    "filter": "model_refused",
    "key": "infrastructure",
    "model": "infrastructure",
    "rate": "infrastructure",
    "broken": "infrastructure",
}


def completion(message, finish="stop"):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture
async def server(uvicorn_server):
    """(url, the answers by the model's name; a callable answers for itself)."""
    answers = dict(ANSWERS)

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        said = answers[json.loads(body)["model"]]
        if said == "silent":
            await asyncio.Event().wait()
        status, data = said
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": json.dumps(data).encode()})

    async with uvicorn_server(app) as url:
        yield url, answers


async def failure(awaitable):
    with pytest.raises(Exception) as caught:
        await awaitable
    return caught.value


def official(url, **options):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, **options)


HI = [{"role": "user", "content": "hi"}]


async def test_the_official_clients_errors(server):
    url, answers = server
    async with official(url) as client:
        found = {
            name: classify(await failure(client.chat.completions.create(model=name, messages=HI))) for name in OUTCOMES
        }
        assert found == OUTCOMES

        class Form(BaseModel):
            x: int

        for finish, outcome in (("length", "truncated"), ("content_filter", "model_refused")):
            answers["cut"] = (200, completion({"content": "{"}, finish))
            parsing = client.chat.completions.parse(model="cut", messages=HI, response_format=Form)
            assert classify(await failure(parsing)) == outcome
    answers["silent"] = "silent"
    async with official(url, timeout=0.05) as client:
        late = await failure(client.chat.completions.create(model="silent", messages=HI))
        assert type(late).__name__ == "APITimeoutError"
        assert classify(late) == "infrastructure"
    async with official(nobody()) as client:
        assert classify(await failure(client.chat.completions.create(model="m", messages=HI))) == "infrastructure"


async def test_a_frameworks_errors(server):
    url, answers = server
    client = official(url)
    provider = OpenAIProvider(openai_client=client)

    def player(model, **options):
        return Framework(OpenAIChatModel(model, provider=provider), **options)

    found = {name: classify(await failure(player(name).run("hi"))) for name in OUTCOMES}
    assert found == OUTCOMES

    answers["nonsense"] = (200, completion({"content": "no form"}))

    class Form(BaseModel):
        x: int

    gave_up = await failure(player("nonsense", output_type=Form, retries=1).run("hi"))
    assert type(gave_up).__name__ == "UnexpectedModelBehavior"
    assert classify(gave_up) == "truncated"
    limited = player("nonsense").run("hi", usage_limits=UsageLimits(request_limit=0))
    assert classify(await failure(limited)) == "truncated"
    assert classify(UserError("wrong use of the framework")) == "agent_error"

    call = {"id": "1", "type": "function", "function": {"name": "act", "arguments": "{}"}}
    answers["tool"] = (200, completion({"content": None, "tool_calls": [call]}, "tool_calls"))
    for raised, outcome in (
        (TideError("environment_failed", "x"), "environment_failed"),
        (TideError("expired", "x", clock="idle"), "truncated"),
        (ZeroDivisionError("x"), "agent_error"),
    ):
        acting = player("tool")
        acting.tool_plain(tool_that_raises(raised))
        assert classify(await failure(acting.run("hi"))) == outcome
    await client.close()


async def test_bare_httpx_errors(server):
    url, answers = server
    answers["silent"] = "silent"

    async def ask(client, model):
        answer = await client.post(url, json={"model": model})
        answer.raise_for_status()

    async with httpx.AsyncClient() as client:
        found = {name: classify(await failure(ask(client, name))) for name in OUTCOMES}
        assert found == OUTCOMES
        assert classify(await failure(client.get(nobody()))) == "infrastructure"

        async def unread():
            async with client.stream("POST", url, json={"model": "broken"}) as answer:
                answer.raise_for_status()

        assert classify(await failure(unread())) == "infrastructure"
    async with httpx.AsyncClient(timeout=0.05) as client:
        assert classify(await failure(ask(client, "silent"))) == "infrastructure"


def nobody() -> str:
    """A URL that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def tool_that_raises(error):
    def act() -> str:
        raise error

    return act


def raised(outer, inner, how):
    """The exception `outer` as Python leaves it when it was raised in a handler of `inner`."""
    outer.__context__ = inner
    if how != "handling":
        outer.__cause__ = inner if how == "from" else None  # this suppresses the context
    return outer


class Wrapped(Exception):
    pass


LOST = httpx.ConnectError("gone")


@pytest.mark.parametrize(
    ("outer", "how", "outcome"),
    [
        (ValueError("x"), "from", "infrastructure"),
        (KeyError("x"), "handling", "agent_error"),
        (NameError("x"), "handling", "agent_error"),
        (ValueError("x"), "handling", "agent_error"),
        (RuntimeError("x"), "handling", "infrastructure"),
        (Wrapped("x"), "handling", "infrastructure"),
        (Wrapped("x"), "from none", "agent_error"),
    ],
)
def test_what_an_error_was_raised_from_counts_unless_it_is_plainly_a_bug(outer, how, outcome):
    assert classify(raised(outer, LOST, how)) == outcome


def test_the_gravest_of_a_group_counts():
    filtered = raised(Wrapped("x"), TideError("expired", "x", clock="idle"), "from")
    assert classify(ExceptionGroup("x", [filtered])) == "truncated"
    assert classify(ExceptionGroup("x", [filtered, LOST])) == "infrastructure"
    assert classify(ExceptionGroup("x", [LOST, ExceptionGroup("y", [ZeroDivisionError()])])) == "agent_error"
    assert classify(raised(Wrapped("x"), ExceptionGroup("x", [LOST]), "from")) == "infrastructure"


def test_a_chain_is_looked_at_to_a_bound_even_where_it_is_a_ring():
    ring = Wrapped("x")
    ring.__cause__ = ring
    assert classify(ring) == "agent_error"
    wide = ExceptionGroup("x", [ExceptionGroup("y", [Wrapped("z") for _ in range(100)]) for _ in range(100)])
    assert classify(wide) == "agent_error"


def test_a_foreign_class_whose_properties_raise_is_no_harm():
    class Odd(Exception):
        @property
        def response(self):
            raise RuntimeError("never")

        status_code = body = response

    assert classify(Odd("x")) == "agent_error"
    assert classify(ConnectionResetError("x")) == "infrastructure"
