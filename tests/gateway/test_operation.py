"""What an operator's tools see of a real gateway: metrics that match what was done, readiness, and lag."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from gateway_cluster import GatewayCluster, scripted
from postgres_server import PostgresServer
from prometheus_client.parser import text_string_to_metric_families

BOUND_S = 30
NAME = re.compile(r"`(tide_\w+)`")
GO = {"role": "assistant", "content": "go"}
TOKENS = "ann:0123456789abcdef,prometheus/operator:fedcba9876543210"


def figures(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """(name, label value, ...) -> number, of a scrape; labels in the order of their names."""
    answer = client.get("/metrics").raise_for_status()
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.name.startswith(("tide_gateway_", "process_")), family.name
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in found, "a series is written once"
            found[key] = sample.value
    return found


def until(client: httpx.Client, holds: Callable[[httpx.Client], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not holds(client):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_ready(client: httpx.Client) -> bool:
    return client.get("/readyz").status_code == 200


def start(client: httpx.Client, key: str, **task: object) -> httpx.Response:
    limits = task.pop("limits", None)
    body = {"environment": "scripted", "key": key, "task": task} | ({"limits": limits} if limits else {})
    return client.post("/start", json=body)


def started(client: httpx.Client, key: str, **task: object) -> str:
    return start(client, key, **task).raise_for_status().json()["task_id"]


def act(client: httpx.Client, task_id: str, turn: int) -> httpx.Response:
    return client.post("/observation", json={"task_id": task_id, "turn": turn, "message": GO})


def test_the_figures_of_a_gateway_match_what_was_done_with_it(gateways):
    with gateways(capacity=2).client() as client:
        before = figures(client)
        assert before["tide_gateway_turns_total", "scripted"] == 0, "a rate needs a zero to begin with"
        assert before["tide_gateway_slots", "scripted"] == 2
        first, second = started(client, "a", turns=2), started(client, "b", limits={"idle": 0.3})
        assert start(client, "c").json()["reason"] == "capacity"
        for turn in (0, 0, 1):
            act(client, first, turn).raise_for_status()
        assert act(client, first, 5).status_code == 409
        until(client, lambda client: client.get(f"/tasks/{second}").json()["state"] == "ended", "its clock runs out")
        third = started(client, "d")
        for call in ("pause", "resume", "pause"):
            client.post(f"/{call}", json={"task_id": third}).raise_for_status()
        time.sleep(1.1)  # what was counted in SQL a moment ago is believed for a second
        during = figures(client)
        for task_id in (first, third):
            client.post("/end", json={"task_id": task_id, "reason": f"{task_id} is enough"}).raise_for_status()
        assert client.get("/nowhere").status_code == 404
        after = figures(client)
        text = client.get("/metrics").text

    assert during["tide_gateway_tasks", "scripted", "done"] == during["tide_gateway_tasks", "scripted", "paused"] == 1
    assert during["tide_gateway_tasks", "scripted", "waiting"] == 0
    assert ("tide_gateway_next_limit_seconds", "scripted") not in during, "no clock runs"
    assert [during["tide_gateway_clocks_running", clock, "scripted"] for clock in ("idle", "turn", "active")] == [0] * 3
    assert during["tide_gateway_instances", "scripted", "ready"] == 1
    assert after["tide_gateway_tasks_started_total", "scripted"] == 3
    assert after["tide_gateway_turns_total", "scripted"] == 2, "a repeated turn is none"
    assert after["tide_gateway_starts_refused_total", "scripted", "capacity"] == 1
    assert after["tide_gateway_tasks_expired_total", "scripted", "idle"] == 1
    ended = {key[2:]: number for key, number in after.items() if key[0] == "tide_gateway_tasks_ended_total"}
    by_reason = {("completed", ""): 1, ("expired", "idle"): 1, ("aborted", "caller"): 1}
    assert {(outcome, reason): number for (outcome, reason), number in ended.items()} == by_reason
    assert after["tide_gateway_paused_seconds_total", "scripted"] > 0.0
    calls = {key[1]: number for key, number in after.items() if key[0] == "tide_gateway_call_seconds_count"}
    assert calls == {"start": 3, "turn": 3, "pause": 2, "resume": 1, "end": 2}
    shares = {
        key[1]: number for key, number in after.items() if key[0] == "tide_gateway_environment_call_seconds_count"
    }
    assert (shares["start"], shares["turn"], shares["end"]) == (3, 2, 3)
    whole, share = (
        after[f"tide_gateway_{what}_seconds_sum", "turn", "scripted"] for what in ("call", "environment_call")
    )
    assert 0.0 < share < whole
    assert after["tide_gateway_launch_seconds_count", "scripted"] == 1
    assert after["tide_gateway_commit_changes_sum",] >= 14, "each start, turn, pause and end is at least one"
    assert after["tide_gateway_commit_changes_count",] == after["tide_gateway_commit_seconds_count",]
    assert after["tide_gateway_requests_total", "/observation", "200"] == 3
    assert after["tide_gateway_requests_total", "/observation", "409"] == 1
    assert after["tide_gateway_requests_total", "/tasks/{task_id}", "200"] >= 1
    assert after["tide_gateway_requests_total", "other", "404"] == 1
    assert after["tide_gateway_requests_in_flight",] == 1, "the scrape itself"
    assert after["tide_gateway_database_up",] == after["tide_gateway_ready",] == 1
    assert after["tide_gateway_runtime_up", "process"] == 1
    assert after["process_resident_memory_bytes",] > 1e7
    assert not [task_id for task_id in (first, second, third) if task_id in text], "no label names a task"


def test_the_document_has_every_metric_and_a_failed_launch_is_counted(gateways):
    text = (Path(__file__).parents[2] / "docs/operating.md").read_text(encoding="utf-8")
    documented = {name for line in text.splitlines() if line.startswith("| `tide") for name in NAME.findall(line)}
    with gateways(command=["/bin/false", "{uds}"]).client() as client:
        assert start(client, "a").status_code == 502
        found = figures(client)
        shown = re.findall(r"^# TYPE (tide_\w+)", client.get("/metrics").text, re.MULTILINE)
    assert documented == set(shown)
    assert found["tide_gateway_launch_failures_total", "scripted"] == 1
    assert found["tide_gateway_instances_lost_total", "scripted"] == 0
    assert ("tide_gateway_launch_seconds_count", "scripted") not in found


def test_a_server_that_dies_and_one_that_does_not_launch_are_counted(gateways):
    with gateways(capacity=2).client() as client:
        task_id = started(client, "a", die_turn=0)
        assert act(client, task_id, 0).json()["code"] == "environment_lost"
        found = figures(client)
    assert found["tide_gateway_instances_lost_total", "scripted"] == 1
    assert found["tide_gateway_tasks_ended_total", "scripted", "failed", "environment_lost"] == 1
    assert found["tide_gateway_turns_total", "scripted"] == 0, "it was not answered"
    assert found["tide_gateway_launch_failures_total", "scripted"] == 0


def test_metrics_are_an_operators_and_readiness_is_everybodys_and_tells_nothing_more(gateways):
    gateway = gateways({"TIDE_GATEWAY_TOKENS": TOKENS})
    for token, status in ((None, 401), ("0123456789abcdef", 403), ("fedcba9876543210", 200)):
        with gateway.client(token) as client:
            assert client.get("/metrics").status_code == status
    with gateway.client() as client:
        ready = client.get("/readyz").json()
        assert client.get("/healthz").json() == {"status": "ok", "replica": ready["replica"]}
    assert ready == {
        "status": "ready",
        "replica": ready["replica"],
        "database": "up",
        "runtimes": {"process": "up"},
    }


@contextlib.contextmanager
def stopped(server: PostgresServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


@pytest.mark.postgres
@pytest.mark.parametrize("away", [stopped, PostgresServer.frozen], ids=["stopped", "hangs"])
def test_a_database_that_is_away_is_told_and_metrics_still_come(gateways, fresh_databases, tmp_path, away):
    (tmp_path / "data").mkdir()
    with fresh_databases.fresh("postgres") as url:
        server = fresh_databases.server
        gateway = gateways(serve=["--database", url, "--data", str(tmp_path / "data")])
        with gateway.client() as client:
            client.timeout = 15.0  # of every answer: who gets none gives up
            assert is_ready(client)
            assert figures(client)["tide_gateway_tasks", "scripted", "waiting"] == 0
            with away(server):
                until(client, lambda client: not is_ready(client), "it is away")
                problem = client.get("/readyz")
                assert (problem.status_code, problem.json()["code"]) == (503, "unavailable")
                assert "database" in problem.json()["away"]
                assert str(server.folder) not in problem.text
                time.sleep(2.1)  # from now on the keys are read anew, in vain
                found = figures(client)
                assert found["tide_gateway_database_up",] == found["tide_gateway_ready",] == 0
                assert found["tide_gateway_runtime_up", "process"] == 1
                assert found["process_cpu_seconds_total",] > 0
                assert ("tide_gateway_tasks", "scripted", "waiting") not in found
                assert client.get("/healthz").status_code == 200
            until(client, is_ready, "it is back")
            time.sleep(1.1)
            assert figures(client)["tide_gateway_database_up",] == 1
        assert gateway.stop() == 0, gateway.log()
        assert gateway.log().count("not ready: ") <= 3, "a change is told, not each question"


def test_a_gateway_is_not_ready_while_every_runtime_is_away(tmp_path):
    dead = f"unix://{tmp_path / 'none.sock'}"
    table = scripted("docker", docker={"image": "none", "engines": [dead]}, command=["serve"])
    with GatewayCluster(tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", {"away": table}) as cluster:
        cluster.start()
        with cluster.client() as client:
            answer = client.get("/readyz")
            assert (answer.status_code, answer.json()["away"]) == (503, ["runtime docker"])
            assert dead not in answer.text
            assert figures(client)["tide_gateway_runtime_up", "docker"] == 0
        cluster.stop()
        cluster.write_environments({"away": table, "scripted": scripted()})
        cluster.start()
        with cluster.client() as client:
            assert client.get("/readyz").json()["runtimes"] == {"docker": "away", "process": "up"}


def test_a_gateway_that_drains_is_not_ready_any_more(gateways):
    gateway = gateways()
    with gateway.client() as client:
        task_id = started(client, "a", step_s=2.0)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO}, timeout=0.3)
        assert is_ready(client)
        gateway.process.send_signal(signal.SIGTERM)
        until(client, lambda client: not is_ready(client), "it drains")
        assert client.get("/readyz").json()["away"] == ["stopping"]
    assert gateway.process.wait(timeout=15) == 0


def test_a_loop_that_stood_still_is_measured_and_told_once(gateways):
    gateway = gateways()
    with gateway.client() as client:
        before = figures(client)
        gateway.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        gateway.process.send_signal(signal.SIGCONT)

        def late(found: dict[tuple[str, ...], float]) -> float:
            name = "tide_gateway_event_loop_lag_seconds"
            return found[f"{name}_count",] - found[f"{name}_bucket", "1.0"]

        until(client, lambda client: late(figures(client)) > late(before), "the lag is seen")
    assert gateway.log().count("the event loop stood still for ") == 1
