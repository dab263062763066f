"""The gateway as an operator runs it: signals, crashes, restarts, tokens, wrong configuration."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

GO = {"role": "assistant", "content": "go"}
TOKENS = {"TIDE_GATEWAY_TOKENS": "alice/author:0123456789abcdef0123,bob:abcdef0123456789abcd"}


def start(client, key="k", **script) -> dict:
    answer = client.post("/start", json={"environment": "scripted", "key": key, "task": script})
    assert answer.status_code == 201, answer.text
    return answer.json()


def server_pid(client) -> int:
    return client.get("/environments").json()[0]["servers"][0]["pid"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_environment_server_is_a_typed_error_and_null_reward(gateways):
    gateway = gateways()
    with gateway.client() as client, ThreadPoolExecutor(1) as pool:
        task_id = start(client, hang_turn=1)["task_id"]
        client.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO})
        idle = start(client, "idle")["task_id"]
        body = {"task_id": task_id, "turn": 1, "message": GO}
        waiting = pool.submit(client.post, "/observation", json=body)
        until(lambda: client.get(f"/tasks/{task_id}").json()["state"] == "acting")
        os.kill(server_pid(client), signal.SIGKILL)
        answer = waiting.result(timeout=10)
        assert (answer.status_code, answer.json()["code"]) == (503, "environment_lost")
        assert client.post("/observation", json=body).status_code == 410
        for lost in (task_id, idle):
            account = client.post("/end", json={"task_id": lost}).json()
            assert (account["reward"], account["outcome"]["reason"]) == (None, "environment_lost")
        assert start(client, "again")["turn"] == 0
        assert client.get("/capacity").json()["scripted"]["free"] == 15


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_g12_a_stop_ends_tasks_and_servers_and_leaves_the_database_whole(gateways, number):
    gateway = gateways(servers=2)
    with gateway.client() as client:
        tasks = [start(client, f"k{i}", hang_turn=0)["task_id"] for i in range(4)]
        pids = [server["pid"] for server in client.get("/environments").json()[0]["servers"]]
        assert len(pids) == 2
        answers: list[int] = []

        def act():
            answer = client.post("/observation", json={"task_id": tasks[0], "turn": 0, "message": GO})
            answers.append(answer.status_code)

        thread = threading.Thread(target=act)
        thread.start()
        until(lambda: client.get(f"/tasks/{tasks[0]}").json()["state"] == "acting")
        assert gateway.stop(number) == 0, gateway.log()
        thread.join(timeout=5)
        assert answers == [503]
    assert not any(alive(pid) for pid in pids)
    with sqlite3.connect(gateway.folder / "gateway.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("SELECT DISTINCT state, reward FROM tasks").fetchall() == [("ended", None)]
        assert database.execute("SELECT count(*) FROM instances").fetchone() == (0,)
    assert "Traceback" not in gateway.log()


def test_kill_9_leaves_the_servers_and_the_next_gateway_goes_on(gateways):
    first = gateways()
    with first.client() as client:
        task_id = start(client)["task_id"]
        answered = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO}).json()
        pid = server_pid(client)
    first.process.kill()
    first.process.wait()
    second = gateways()
    with second.client() as client:
        again = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO}).json()
        assert {**again, "clocks": 0} == {**answered, "clocks": 0}
        following = client.post("/observation", json={"task_id": task_id, "turn": 1, "message": GO}).json()
        assert following["info"]["effects"] == 2
        assert server_pid(client) == pid
        repeated = client.post("/start", json={"environment": "scripted", "key": "k", "task": {}})
        assert repeated.json()["task_id"] == task_id
        assert start(client, "new")["turn"] == 0
    assert second.stop() == 0
    until(lambda: not alive(pid))


def test_kill_9_takes_the_servers_along_where_they_may_not_outlive_it(gateways):
    first = gateways(serve=["--outlive-s", "0"])
    with first.client() as client:
        task_id = start(client)["task_id"]
        pid = server_pid(client)
    first.process.kill()
    first.process.wait()
    until(lambda: not alive(pid))
    with gateways().client() as client:
        refused = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO})
        assert (refused.status_code, refused.json()["code"]) in ((503, "environment_lost"), (410, "ended"))
        account = client.post("/end", json={"task_id": task_id}).json()
        assert (account["reward"], account["outcome"]["reason"]) == (None, "environment_lost")


def test_a_second_gateway_on_the_same_file_is_refused(gateways):
    gateway = gateways()
    argv = [sys.executable, "-m", "tide_gateway", "serve", "--port", "0"]
    argv += ["--config", str(gateway.folder / "environments.toml")]
    argv += ["--database", f"sqlite:///{gateway.folder / 'gateway.db'}"]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert second.returncode == 2
    assert "another gateway uses" in second.stderr


def test_tokens_make_owners(gateways):
    gateway = gateways(TOKENS)
    alice, bob = (entry.split(":")[1] for entry in TOKENS["TIDE_GATEWAY_TOKENS"].split(","))
    with gateway.client() as nobody, gateway.client("wrong" * 5) as wrong:
        for client in (nobody, wrong):
            for answer in (client.get("/tasks"), client.post("/end", json={"task_id": "t"}), client.get("/capacity")):
                assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert nobody.get("/healthz").status_code == 200
    with gateway.client(alice) as first, gateway.client(bob) as second:
        task_id = start(first)["task_id"]
        for answer in (
            second.post("/end", json={"task_id": task_id}),
            second.get("/observation", params={"task_id": task_id}),
            second.get(f"/tasks/{task_id}"),
        ):
            assert answer.status_code == 404
        assert second.get("/tasks").json()["tasks"] == []
        assert start(second)["task_id"] != task_id
        assert first.post("/end", json={"task_id": task_id}).status_code == 200
    assert alice not in gateway.log()
    environ = Path(f"/proc/{gateway.process.pid}/environ").read_bytes()
    assert alice.encode() in environ  # the gateway has it
    with gateway.client(alice) as first:
        assert alice.encode() not in Path(f"/proc/{server_pid(first)}/environ").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "set TIDE_GATEWAY_TOKENS"),
        (["--host", "203.0.113.7"], "set TIDE_GATEWAY_TOKENS"),
        (["--port", "99999"], "cannot listen"),
        (["--config", "/no/such.toml"], "name the file with --config"),
        (["--database", "mysql://x/y"], "not supported"),
        (["--database", "nonsense"], "not a URL"),
        (["--database", "sqlite:////no/such/folder/x.db"], "cannot be written"),
    ],
)
def test_a_wrong_start_is_exit_code_2_and_one_line(tmp_path, arguments, words):
    assert_refused(tmp_path, arguments, words)


def test_a_port_in_use_is_exit_code_2(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert_refused(tmp_path, ["--port", str(taken.getsockname()[1])], "in use")


def assert_refused(folder: Path, arguments: list[str], words: str) -> None:
    config = folder / "environments.toml"
    config.write_text('[environments.scripted]\nruntime = "fake"\n')
    argv = [sys.executable, "-m", "tide_gateway", "serve", "--config", str(config), "--port", "0"]
    argv += ["--database", f"sqlite:///{folder / 'gateway.db'}", *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TIDE_")}
    run = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=environ)
    assert run.returncode == 2, run.stderr
    assert words in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
