"""The server in Node, called directly: numbers, texts, sizes, clocks, addresses, and its stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from node_server import SERVER, node_program, node_server

MIB = 1024 * 1024
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with node_server(tmp_path_factory.mktemp("node"), "--port", "0") as server, server.client() as client:
        yield client
        assert server.stop() == 0, server.log.read_text()
        assert server.log.read_text().count("\n") == 1, "it says where it is, and nothing else"


def start(client, key, **fields):
    answer = client.post("/start", json={"environment": "codebreaker", "key": key, "seed": 7} | fields)
    assert answer.status_code == 201, answer.text
    return answer.json()["task_id"]


def act(client, task_id, turn=0, content="hello", **message):
    message = {"role": "assistant", "content": content} | message
    return client.post("/observation", json={"task_id": task_id, "turn": turn, "message": message})


def code_of(answer):
    return answer.status_code, answer.json()["code"]


def turn_seconds(client, task_id):
    return client.get("/observation", params={"task_id": task_id}).json()["clocks"]["turn"]["consumed_s"]


def test_whole_numbers_are_exact_to_64_bits(client):
    task_id = start(client, "numbers", seed=2**63 - 1)
    paused = client.post("/pause", json={"task_id": task_id, "epoch": 2**63 - 2}).json()
    assert paused["epoch"] == 2**63 - 2
    assert client.post("/resume", json={"task_id": task_id, "epoch": 2**63 - 1}).json()["state"] == "waiting"
    late = client.post("/pause", json={"task_id": task_id, "epoch": 2**63 - 1})
    assert (late.json()["state"], late.json()["epoch"]) == ("waiting", 2**63 - 1)
    assert code_of(client.post("/pause", json={"task_id": task_id, "epoch": 2**63})) == (422, "invalid")

    assert act(client, task_id, n=2**60 + 1).status_code == 200
    assert code_of(act(client, task_id, n=2**60 + 2)) == (409, "turn_conflict")
    assert act(client, task_id, n=2**60 + 1).status_code == 200


def test_messages_are_the_same_as_json(client):
    task_id = start(client, "same")
    first = act(client, task_id, x={"a": 1, "b": [None, True]}, s="whole-1").json()
    again = {"s": "whole-1", "x": {"b": [None, True], "a": 1.0}, "content": "hello", "role": "assistant"}
    body = json.dumps({"message": again, "turn": 0, "task_id": task_id}, indent=2)
    assert client.post("/observation", content=body, headers=JSON).json() == first
    for other in ({"a": True, "b": [None, True]}, {"a": 1, "b": [None, True], "c": None}, {"a": 1, "b": {"0": None}}):
        assert code_of(act(client, task_id, x=other, s="whole-1")) == (409, "turn_conflict")


@pytest.mark.parametrize(
    "message",
    [
        b'{"role":"assistant","content":"\\ud800"}',
        b'{"role":"assistant","\\udfff":1}',
        b'{"role":"assistant","content":"\xff"}',
        b'{"role":"assistant","x":1e999}',
        b'{"role":"assistant","x":%b}' % (b"9" * 400),
        b'{"role":"assistant","x":%be99}' % (b"9" * 250),
        b'{"role":"assistant","x":NaN}',
        b'{"role":"assistant","x":0123456789012345678}',
        b'{"role":"assistant","x":' + b"[" * 249 + b"]" * 249 + b"}",
        b'{"role":"assistant"',
    ],
    ids=lambda message: message[20:50].decode("latin-1"),
)
def test_what_is_not_the_contracts_json_is_refused(client, message):
    body = b'{"task_id":"t","turn":0,"message":%b}' % message
    answer = client.post("/observation", content=body, headers=JSON)
    assert code_of(answer) == (422, "invalid")
    assert answer.json()["field"] == "body"


def test_deep_and_strange_but_valid_json_is_taken(client):
    task_id = start(client, "strange")
    strange = {"__proto__": {"x": 1}, "constructor": 12345678901234567890, "text": '"\\ 1234567890123456789 \U0001f600'}
    deep = json.loads("[" * 248 + "]" * 248)
    for _ in range(2):
        assert act(client, task_id, content=None, deep=deep, strange=strange).status_code == 200
    assert code_of(act(client, task_id, content=None, deep=deep, strange=strange | {"__proto__": 1}))[0] == 409


def test_characters_are_counted_as_people_count_them(client):
    assert start(client, "\U00010348" * 512)
    long = client.post("/start", json={"environment": "e", "key": "\U00010348" * 513})
    assert (code_of(long), long.json()["field"]) == ((422, "invalid"), "key")


def test_too_large_bodies_are_refused_and_the_connection_goes_on(client):
    def pieces():
        yield from [b" " * MIB] * 33

    answer = client.post("/start", content=pieces(), headers=JSON)
    assert code_of(answer) == (413, "too_large")
    assert client.post("/start", content=b" " * (33 * MIB), headers=JSON).status_code == 413
    assert client.post("/pause", content=b" " * (65 * 1024), headers=JSON).status_code == 413
    large = {"environment": "e", "key": "large", "task": {"x": "y" * (4 * MIB)}}
    answer = client.post("/start", json=large)
    assert (answer.status_code, answer.json()["field"]) == (413, "task")
    assert client.get("/health").status_code == 200


def test_a_turn_clock_that_runs_out_is_told_to_who_waits_and_leaves_no_reward(client):
    task_id = start(client, "late", task={"delay_s": 60}, limits={"turn": 0.3})
    waited = act(client, task_id, content="1111")
    assert (code_of(waited), waited.json()["clock"]) == ((504, "turn_expired"), "turn")
    later = act(client, task_id, content="1111")
    assert (code_of(later), later.json()["clock"]) == ((410, "expired"), "turn")
    # The game's code cannot be stopped, so the end waits for it as long as its own clock lets it.
    other = start(client, "late-2", task={"delay_s": 60}, limits={"turn": 0.3, "end": 0.3})
    assert act(client, other, content="1111").status_code == 504
    account = client.post("/end", json={"task_id": other}).json()
    assert account["reward"] is None
    assert (account["outcome"]["kind"], account["outcome"]["clock"]) == ("expired", "turn")
    assert account["metrics"] == {"end_expired": True}


def test_a_paused_tasks_clocks_stand_still(client):
    paused, other = (start(client, key, limits={"idle": 0.3}) for key in ("paused", "other"))
    assert client.post("/pause", json={"task_id": paused}).json()["state"] == "paused"
    while client.get("/observation", params={"task_id": other}).status_code == 200:
        pass
    answer = client.get("/observation", params={"task_id": other})
    assert (code_of(answer), answer.json()["clock"]) == ((410, "expired"), "idle")
    assert client.post("/resume", json={"task_id": paused}).json()["state"] == "waiting"
    assert act(client, paused).status_code == 200


def test_what_is_no_http_is_a_problem_too(client):
    host, port = client.base_url.host, client.base_url.port
    with socket.create_connection((host, port), timeout=10) as raw:
        raw.sendall(b"HELLO\r\n\r\n")
        answer = raw.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 422 ")
    assert b"application/problem+json" in answer
    assert client.get("/health").status_code == 200


def test_a_stop_answers_who_waits_and_ends_well(tmp_path):
    uds = tmp_path / "s.sock"
    with node_server(tmp_path, "--uds", str(uds)) as server, server.client() as client:
        assert stat.S_IMODE(uds.stat().st_mode) == 0o600
        task_id = start(client, "k", task={"delay_s": 60})
        with ThreadPoolExecutor(1) as pool, server.client() as second:
            acting = pool.submit(act, second, task_id, content="1111")
            while not turn_seconds(client, task_id):
                assert not acting.done()
            assert server.stop() == 0
            assert code_of(acting.result(timeout=10)) == (410, "ended")
    assert not uds.exists()


def test_a_socket_of_a_killed_server_is_no_hindrance_and_variables_name_it_too(tmp_path):
    uds = tmp_path / "s.sock"
    with node_server(tmp_path, "--uds", str(uds)) as server:
        os.kill(server.process.pid, signal.SIGKILL)
    assert uds.exists()
    environ = os.environ | {"TIDE_UDS": str(uds), "TIDE_PORT": "1", "TIDE_CAPACITY": "3"}
    with node_server(tmp_path, environ=environ) as server, server.client() as client:
        assert stat.S_IMODE(uds.stat().st_mode) == 0o666
        assert client.get("/health").json()["capacity"] == 3
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "99999"), "--port (TIDE_PORT) must be a whole number from 0 to 65535, not 99999"),
        (("--capacity", "0"), "--capacity (TIDE_CAPACITY) must be a whole number"),
        (("--host", "0.0.0.0"), "give --allow-public"),
        (("--prot", "1"), "--prot"),
        (("--port", "{taken}"), "EADDRINUSE"),
    ],
)
def test_a_wrong_call_ends_with_a_line_that_says_why(client, words, said):
    filled = [word.replace("{taken}", str(client.base_url.port)) for word in words]
    done = subprocess.run([node_program(), SERVER, *filled], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_a_caller_that_goes_away_in_its_body_leaves_nothing(client):
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as raw:
        raw.sendall(b"POST /start HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
    assert client.get("/health").status_code == 200
