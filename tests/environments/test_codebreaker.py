"""The environment server in Node: its game, whole episodes behind a real gateway, and the contract's check."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema
import pytest
from gateway_cluster import GatewayCluster
from node_server import ROOT, SERVER, announced, node_program, node_server

from tide_sdk import cli

RULES = Path(__file__).with_name("codebreaker_rules.test.mjs")
CHECKED_TASK = {"max_turns": 100, "delay_s": 1}
CODE_OF_SEED_1 = "1621"


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
    assert re.search(r"^\S+ pass [1-9]", done.stdout, re.MULTILINE), done.stdout


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


@pytest.fixture(scope="module", params=["node", "sdk", "gateway"])
def checked(request, tmp_path_factory):
    """A client of a server in each language and of the gateway; the published schema checks all that is said."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("schema")
        if request.param == "gateway":
            url = str(request.getfixturevalue("gateway").base_url)
        elif request.param == "node":
            url = stack.enter_context(node_server(folder, "--port", "0")).url
        else:
            words = ["-m", "tide_sdk.cli", "serve", "tide_environments.babyai.environment:BabyAI"]
            url = stack.enter_context(announced(folder, [sys.executable, *words])).url
        hooks = {"response": [check_by_schema]}
        yield stack.enter_context(httpx.Client(base_url=url, timeout=30, event_hooks=hooks))


@functools.cache
def published() -> dict:
    return json.loads((ROOT / "docs" / "contract.schema.json").read_text(encoding="utf-8"))


@functools.cache
def validator(ref: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(published() | {"$ref": ref})


def check_by_schema(response: httpx.Response) -> None:
    response.read()
    asked = response.request
    name = f"{asked.method} {asked.url.path}" + ("?task_id=" if asked.url.query else "")
    call = next(call for call in published()["calls"] if call["call"] == name)
    if response.status_code < 400:
        assert response.status_code == call["status"]
        validator(call["answer"]["$ref"]).validate(response.json())
        if call["request"]:
            validator(call["request"]["$ref"]).validate(json.loads(asked.content))
    else:
        assert response.headers["content-type"] == "application/problem+json"
        validator("#/$defs/Problem").validate(response.json())
        told = published()["codes"][response.json()["code"]]
        assert (told["status"], told["title"]) == (response.status_code, response.json()["title"])


def test_all_that_servers_say_is_as_the_published_schema_has_it(checked):
    started = call(checked, "/start", 201, environment="codebreaker", key="schema", seed=1)
    task_id = started["task_id"]
    call(checked, "/start", 409, environment="codebreaker", key="schema", seed=2)
    call(checked, "/start", 422, environment="codebreaker")
    call(checked, "/observation", task_id=task_id, turn=0, message=say("hello"))
    call(checked, "/observation", 409, task_id=task_id, turn=5, message=say("hello"))
    call(checked, "/pause", task_id=task_id, epoch=1)
    call(checked, "/observation", 423, task_id=task_id, turn=1, message=say("hello"))
    call(checked, "/resume", task_id=task_id)
    assert checked.get("/observation", params={"task_id": task_id}).status_code == 200
    call(checked, "/end", task_id=task_id, reason="enough")
    call(checked, "/observation", 410, task_id=task_id, turn=1, message=say("hello"))
    call(checked, "/pause", 404, task_id="nobody")
    if checked.get("/capacity").status_code == 404:
        assert checked.get("/health").status_code == 200
    else:
        call(checked, "/heartbeat", timeout_s=60)


def test_the_check_of_the_contract_passes(tmp_path, capsys):
    """Nothing is left out but what the game has not: large observations and images."""
    report = tmp_path / "report.json"
    words = ["check", "--task", json.dumps(CHECKED_TASK), "--action", "hello", "--slow-action", '{"content": "1111"}']
    words += ["--end-action", CODE_OF_SEED_1, "--json", str(report)]
    code = cli.main([*words, "--", node_program(), SERVER, "--port", "{port}", "--capacity", "{capacity}"])
    told = capsys.readouterr()
    assert code == 0, told.out + told.err
    checks = json.loads(report.read_text())["checks"]
    left_out = {check["id"] for check in checks if check["result"] == "skip"}
    assert left_out == {"observation.large", "observation.images"}
    assert len(checks) > len(left_out)
