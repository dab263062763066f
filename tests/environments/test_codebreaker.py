"""The environment server in Node: its game, whole episodes behind a real gateway, and the contract's check."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from gateway_cluster import GatewayCluster
from node_server import SERVER, node_program

from tide_sdk import cli

RULES = Path(__file__).with_name("codebreaker_rules.test.mjs")
TASK = {"max_turns": 100, "delay_s": 1}


def say(words: str) -> dict[str, str]:
    return {"role": "assistant", "content": words}


def compare(secret: str, guess: str) -> tuple[int, int]:
    right = sum(a == b for a, b in zip(secret, guess, strict=True))
    return right, (Counter(secret) & Counter(guess)).total() - right


def still_possible(codes: list[str], answer: str) -> list[str]:
    guess, right, misplaced = re.fullmatch(r"(\d+): (\d+) right, (\d+) misplaced\.", answer).groups()
    return [code for code in codes if compare(code, guess) == (int(right), int(misplaced))]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codebreaker")
    command = [node_program(), SERVER, "--uds", "{uds}", "--capacity", "{capacity}"]
    over_port = [node_program(), SERVER, "--port", "{port}", "--capacity", "{capacity}"]
    tables = {
        "codebreaker": {"command": command, "capacity": 8},
        "over-port": {"command": over_port, "capacity": 8},
    }
    with GatewayCluster(folder, f"sqlite:///{folder / 'gateway.db'}", tables) as cluster:
        cluster.start(0)
        with httpx.Client(base_url=cluster.urls[0], timeout=30) as client:
            yield client


def call(client: httpx.Client, path: str, status: int = 200, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_the_rules_of_the_game_hold():
    done = subprocess.run([node_program(), "--test", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^# pass [1-9]", done.stdout, re.MULTILINE), done.stdout


def test_an_agent_breaks_a_code_through_pauses_behind_a_gateway(gateway):
    started = call(gateway, "/start", 201, environment="codebreaker", key="whole", seed=7, task={"delay_s": 0.5})
    task_id, codes = started["task_id"], ["".join(code) for code in itertools.product("123456", repeat=4)]
    observed = call(gateway, "/observation", task_id=task_id, turn=0, message=say(codes[7]))
    codes = still_possible(codes, observed["messages"][0]["content"])

    paused = call(gateway, "/pause", task_id=task_id, epoch=1)
    assert paused["state"] == "paused"
    refused = call(gateway, "/observation", 423, task_id=task_id, turn=1, message=say(codes[0]))
    assert refused["code"] == "paused"
    later = gateway.get("/observation", params={"task_id": task_id}).json()
    assert later["clocks"] == paused["clocks"], "no clock of a paused task moves"
    assert later["messages"] == observed["messages"]
    assert call(gateway, "/resume", task_id=task_id, epoch=2)["state"] == "waiting"

    turn = 1
    while not observed["terminated"]:
        action = {"task_id": task_id, "turn": turn, "message": say(f"My guess is {codes[0]}.")}
        observed = call(gateway, "/observation", **action)
        assert call(gateway, "/observation", **action)["messages"] == observed["messages"], "a repeat is not played"
        turn = observed["turn"]
        if not observed["terminated"]:
            codes = still_possible(codes, observed["messages"][0]["content"])
    account = call(gateway, "/end", task_id=task_id)
    assert account["reward"] == 1
    assert account["turns"] == account["metrics"]["turns"] == turn
    assert account["outcome"]["kind"] == "completed"


def test_a_pause_takes_effect_when_the_server_has_acted(gateway):
    started = call(gateway, "/start", 201, environment="codebreaker", key="slow", seed=7, task={"delay_s": 3})
    task_id = started["task_id"]
    action = {"task_id": task_id, "turn": 0, "message": say("1111")}
    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(call, gateway, "/observation", **action)
        while gateway.get(f"/tasks/{task_id}").json()["state"] != "acting":
            assert not acting.done()
        assert call(gateway, "/pause", task_id=task_id)["state"] == "pausing"
        assert acting.result(timeout=30)["turn"] == 1
    assert call(gateway, "/pause", task_id=task_id)["state"] == "paused"
    call(gateway, "/observation", 423, task_id=task_id, turn=1, message=say("hello"))
    assert call(gateway, "/resume", task_id=task_id)["state"] == "waiting"
    assert call(gateway, "/observation", task_id=task_id, turn=1, message=say("hello"))["turn"] == 2
    assert call(gateway, "/end", task_id=task_id)["metrics"]["turns"] == 2


def test_a_gateway_reaches_it_at_a_port_and_passes_its_refusals_on(gateway):
    refused = call(gateway, "/start", 422, environment="over-port", key="bad", task={"length": 99})
    assert (refused["code"], refused["field"]) == ("invalid", "task.length")
    started = call(gateway, "/start", 201, environment="over-port", key="good", seed=2**63 - 1, task={"tools": True})
    assert started["tools"][0]["function"]["name"] == "guess"
    calls = [{"id": "a", "type": "function", "function": {"name": "guess", "arguments": '{"code": "1234"}'}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    observed = call(gateway, "/observation", task_id=started["task_id"], turn=0, message=message)
    assert observed["messages"][0]["tool_call_id"] == "a"
    call(gateway, "/end", task_id=started["task_id"], reason="enough")
