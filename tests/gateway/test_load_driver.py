"""The harness itself: a load that sees every lie, a cluster that finds its servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from gateway_cluster import GatewayCluster, scripted
from load_driver import Load, Report, drive
from marked_servers import COOKIE, MARK

from tide_gateway.runtimes.fake import ScriptedEnvironment
from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.http import DeadlineExceeded, LeanClient

Lie = Callable[[str, dict[str, Any], dict[str, Any]], dict[str, Any]]
SLEEP = "import time; time.sleep(600)"
LOAD = Load(tasks=8, turns=3, repeat=0.5, task_deadline_s=10.0, call_deadline_s=3.0)


class Liar:
    """A gateway that plays well, but for what `lie` does to its answers, and counts its calls."""

    def __init__(self, lie: Lie) -> None:
        self.environment = ScriptedEnvironment(64)
        self.lie = lie
        self.played: dict[tuple[str, int], dict[str, Any]] = {}

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive())["body"]
        request = codec.loads(body)
        turn = (request.get("task_id", ""), request.get("turn", -1))
        if turn in self.played:  # the contract's gateway answers it also after the end
            status, data = 200, self.played[turn]
        else:
            status, data = await self.environment.handle(scope["method"], scope["path"], body)
        if status == 200 and scope["path"] == "/observation":
            self.played[turn] = data
        try:
            answer = self.lie(scope["path"], request, data)
        except TideError as error:
            status, answer = error.status, error.problem().model_dump()
        headers = [(b"retry-after", b"0")] if status == 429 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": codec.dumps(answer)})


@contextlib.asynccontextmanager
async def lying(lie: Lie) -> AsyncIterator[list[str]]:
    """Two addresses of one liar."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Liar(lie), lifespan="off", log_level="warning", access_log=False))
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield [f"http://127.0.0.1:{listener.getsockname()[1]}"] * 2
    finally:
        server.should_exit = True
        await serving


async def driven(lie: Lie) -> Report:
    async with lying(lie) as urls:
        return await drive(urls, LOAD)


async def test_whatever_may_be_repeated_is_repeated_and_every_task_finishes():
    refusals = iter(["unavailable", "capacity", "paused", "unavailable"] * 5)

    def lie(path, request, data):
        if code := next(refusals, None):
            raise TideError(code, "not now")
        return data

    report = await driven(lie)
    assert (report.finished, report.faults, report.turns) == (8, 0, 24), str(report)
    assert report.repeated > 0
    assert report.retries == {"unavailable": 10, "capacity": 5, "paused": 5}


async def test_a_doubled_side_effect_is_found():
    def lie(path, request, data):
        if path == "/observation" and request["turn"] == 1:
            return {**data, "info": {"effects": 3}}
        return data

    assert len((await driven(lie)).doubled) == 8


async def test_a_repeated_call_with_another_answer_is_found():
    calls = iter(range(10_000))

    def lie(path, request, data):
        return {**data, "info": {**data["info"], "n": next(calls)}} if path == "/observation" else data

    report = await driven(lie)
    assert report.wrong
    assert all(": first {" in words for words in report.wrong)
    assert report.finished + len(report.wrong) == 8


async def test_a_forgotten_task_is_lost():
    def lie(path, request, data):
        if path == "/observation" and request["turn"] == 2:
            raise TideError("not_found", "no such task")
        return data

    report = await driven(lie)
    assert (len(report.lost), report.finished) == (8, 0)


async def test_a_lost_environment_is_counted_by_its_outcome_and_must_have_no_reward():
    def lie(path, request, data):
        if path == "/observation" and request["turn"] == 2:
            raise TideError("ended", "the task has ended")
        if path == "/end":
            number = int(request["task_id"][1:])
            outcome = {"kind": "failed", "reason": "environment_lost"}
            return {**data, "outcome": outcome, "reward": 0.0 if number < 2 else None}
        return data

    report = await driven(lie)
    assert report.infrastructure == {"failed(environment_lost)": 6}
    assert len(report.wrong) == 2


async def test_a_gateway_that_never_answers_loses_the_task_and_not_the_driver():
    def lie(path, request, data):
        raise TideError("unavailable", "never")

    report = await driven(lie)
    assert len(report.lost) == 8
    assert report.started == 0


async def test_a_cluster_serves_a_load_over_a_restart_and_leaves_nothing(tmp_path):
    tables = {"scripted": scripted(servers=2, capacity=32)}
    with GatewayCluster(tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", tables) as cluster:
        await asyncio.to_thread(cluster.start_all)
        urls = cluster.urls
        load = Load(tasks=20, turns=3, repeat=0.3, pause=0.5, pause_s=0.05)
        report = await drive(cluster.urls, load)
        assert (report.finished, report.faults) == (20, 0), str(report)
        assert report.pauses > 0
        assert report.pause_drift_s == 0.0
        assert {server.name for server in cluster.servers()} == set(cluster.listed())
        assert cluster.orphans() == []
        cluster.hang(0, True)
        async with LeanClient(cluster.urls[0]) as client:
            with pytest.raises(DeadlineExceeded):
                await client.request("GET", "/healthz", timeout_s=0.3)
        await asyncio.to_thread(cluster.stop, 0, signal.SIGTERM)
        assert cluster.servers() == []
        await asyncio.to_thread(cluster.restart, 0)
        assert cluster.urls == urls
        again = await drive(urls, replace(load, key="again"))
        assert (again.finished, again.faults) == (20, 0), str(again)


def test_a_server_that_no_gateway_lists_is_an_orphan_and_is_removed(tmp_path):
    cluster = GatewayCluster(tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", {"scripted": scripted()})
    variables = {COOKIE: cluster.cookie, MARK: "scripted-nobody"}
    with subprocess.Popen([sys.executable, "-c", SLEEP], env=variables) as orphan, cluster_closed(cluster):
        cluster.start()
        assert [server.name for server in cluster.orphans()] == ["scripted-nobody"]
        assert cluster.close() == [f"orphan: scripted-nobody (processes [{orphan.pid}])"]
        assert orphan.wait(10) == -signal.SIGKILL
    assert cluster.servers() == []


@contextlib.contextmanager
def cluster_closed(cluster):
    try:
        yield
    finally:
        cluster.close()
