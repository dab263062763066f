"""Environment servers that answer outside the contract: typed errors at once, and tasks that end all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tide_gateway import upstream
from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.fake import FakeChannel
from tide_sdk.errors import TideError
from tide_sdk.http import ConnectFailed, ProtocolFailed
from tide_sdk.http_parse import Response

DEEP = b"[" * 300 + b"]" * 300
"""A body that can be read, but that is too deep to be written again."""


@pytest.fixture
def spoil(monkeypatch) -> Callable[..., list[str]]:
    """Puts `change(status, body)` between the fake environment and the gateway; counts the calls of the path."""
    honest = FakeChannel.request

    def install(path: str, change: Callable[[int, bytes], tuple[int, bytes]]) -> list[str]:
        calls: list[str] = []

        async def request(self, method, target, body=None, **options):
            response = await honest(self, method, target, body, **options)
            if target != path:
                return response
            calls.append(target)
            status, changed = change(response.status, response.body)
            return Response(status, {}, changed)

        monkeypatch.setattr(FakeChannel, "request", request)
        return calls

    return install


def with_field(name: str, value: bytes) -> Callable[[int, bytes], tuple[int, bytes]]:
    return lambda status, body: (status, body[:-1] + b',"%b":%b}' % (name.encode(), value))


async def failure(call) -> TideError:
    with pytest.raises(TideError) as caught:
        async with asyncio.timeout(10):
            await call
    return caught.value


async def test_a_first_observation_too_deep_to_store_fails_the_start_at_once(bench, spoil):
    spoil("/start", with_field("tools", b'[{"deep":%b}]' % DEEP))
    assert (await failure(bench.start())).code == "environment_failed"


async def test_an_observation_too_deep_to_store_fails_the_task_at_once(bench, spoil):
    task_id = (await bench.start())["task_id"]
    spoil("/observation", with_field("info", b'{"deep":%b}' % DEEP))
    assert (await failure(bench.act(task_id, 0))).code == "environment_failed"
    assert (await bench.end(task_id))["reward"] is None


@pytest.mark.parametrize("turns", [0, 1])
async def test_an_account_too_deep_to_store_ends_the_task_without_a_reward(bench, spoil, turns):
    task_id = (await bench.start(turns=turns))["task_id"]
    spoil("/end", with_field("metrics", b'{"deep":%b}' % DEEP))
    await bench.act(task_id, 0)
    account = await bench.end(task_id)
    assert account["reward"] is None
    assert await bench.state(task_id) == "ended"
    assert await bench.taken() == 0


async def test_a_metric_beyond_64_bits_does_not_keep_a_task_from_ending(bench, spoil):
    task_id = (await bench.start())["task_id"]
    spoil("/end", with_field("metrics", b'{"n":%d}' % 10**30))
    assert (await bench.end(task_id))["metrics"] == {"n": 1e30}


@pytest.mark.parametrize(("name", "value"), [("terminated", b'"no"'), ("reward", b'"0.5"'), ("turn", b'"1"')])
async def test_a_value_of_another_type_is_not_passed_on_to_the_agent(bench, spoil, name, value):
    task_id = (await bench.start())["task_id"]
    spoil("/observation", with_field(name, value))
    error = await failure(bench.act(task_id, 0))
    assert error.code == "environment_failed"
    assert name in error.detail


async def test_an_answer_that_is_not_http_is_a_failure_and_not_asked_for_again(bench, monkeypatch):
    task_id = (await bench.start())["task_id"]
    calls: list[str] = []
    honest = FakeChannel.request

    async def request(self, method, target, body=None, **options):
        if target != "/observation":
            return await honest(self, method, target, body, **options)
        calls.append(target)
        raise ProtocolFailed("the peer does not speak HTTP/1")

    monkeypatch.setattr(FakeChannel, "request", request)
    assert (await failure(bench.act(task_id, 0))).code == "environment_failed"
    assert len(calls) == 1


async def test_a_server_too_busy_to_take_connections_is_not_lost(bench, monkeypatch):
    task_id = (await bench.start())["task_id"]
    monkeypatch.setattr(upstream, "_RESEND_PAUSE_S", 0.001)
    monkeypatch.setattr(upstream, "_MAX_RESEND_PAUSE_S", 0.001)
    refused = 0
    honest = FakeChannel.request

    async def request(self, method, target, body=None, **options):
        nonlocal refused
        if refused < 40:
            refused += 1
            raise ConnectFailed("the backlog is full")
        return await honest(self, method, target, body, **options)

    monkeypatch.setattr(FakeChannel, "request", request)
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1


async def test_a_refused_start_names_the_field_also_when_it_is_repeated(bench):
    for _ in range(2):
        error = await failure(bench.start(refuse=True))
        assert (error.code, error.extra["field"]) == ("invalid", "task.refuse")
        assert error.detail == "task.refuse: the script refuses to start"


async def test_a_refusal_that_names_no_field_is_the_tasks(bench, spoil):
    problem = json.dumps({"code": "invalid", "detail": "no such level"}).encode()
    spoil("/start", lambda _status, _body: (422, problem))
    error = await failure(bench.start())
    assert (error.extra["field"], error.detail) == ("task", "task: no such level")


async def test_a_servers_words_are_kept_to_a_length(bench, spoil):
    task_id = (await bench.start())["task_id"]
    problem = json.dumps({"code": "internal", "detail": "x" * 1_000_000}).encode()
    spoil("/observation", lambda _status, _body: (500, problem))
    error = await failure(bench.act(task_id, 0))
    assert len(error.detail) < 2 * upstream.MAX_WORDS
    assert all(len(detail) < 2 * upstream.MAX_WORDS for _, _, detail in await bench.service.history("local", task_id))


async def test_last_words_that_no_database_stores_do_not_keep_an_instance_from_ending(bench, monkeypatch, eventually):
    launches = []

    async def launch(name, slot, spec, timeout_s):
        launches.append(name)
        raise LaunchFailed("the environment server exited; its last words: a\0b")

    monkeypatch.setattr(bench.runtime, "launch", launch)
    assert (await failure(bench.start())).code == "environment_failed"

    async def forgotten() -> bool:
        return await bench.repository.instances.all() == []

    await eventually(forgotten, "nothing of the instance is left")
    assert len(launches) == len(set(launches)), "no instance is launched a second time"
