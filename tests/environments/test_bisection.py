"""The environment server in Java, written from the contract's page alone: the contract's check, and an episode."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest
from gateway_cluster import GatewayCluster

from tide_sdk import cli

pytestmark = pytest.mark.java

FOLDER = Path(__file__).resolve().parents[2] / "environments" / "tide_environments" / "bisection"
LEAN = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
COMPILE_S = 120.0


@pytest.fixture(scope="session")
def command(tmp_path_factory) -> list[str]:
    """Starts the server, compiled once."""
    build = tmp_path_factory.mktemp("bisection")
    sources = [str(path) for path in sorted(FOLDER.glob("*.java"))]
    words = ["javac", "-Xlint:all", "-Werror", "-d", str(build), *sources]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMPILE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return ["java", *LEAN, "-cp", str(build), "Server", "--port", "{port}", "--capacity", "{capacity}"]


def test_the_check_of_the_contract_passes(command, tmp_path, capsys):
    """Nothing is left out but what the game has not: large observations and images."""
    report = tmp_path / "report.json"
    words = ["check", "--action", "I am not sure", "--slow-action", "hint", "--end-action", "give up"]
    code = cli.main([*words, "--json", str(report), "--", *command])
    told = capsys.readouterr()
    assert code == 0, told.out + told.err
    checks = json.loads(report.read_text())["checks"]
    left_out = {check["id"] for check in checks if check["result"] == "skip"}
    assert left_out == {"observation.large", "observation.images"}
    assert len(checks) > len(left_out)


def test_an_agent_finds_the_number_behind_a_gateway(command, tmp_path):
    tables = {"bisection": {"command": command, "capacity": 4}}
    with GatewayCluster(tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", tables) as cluster:
        cluster.start(0)
        with httpx.Client(base_url=cluster.urls[0], timeout=30) as client:
            refused = client.post("/start", json={"environment": "bisection", "key": "bad", "task": {"higest": 9}})
            assert (refused.status_code, refused.json()["field"]) == (422, "task.higest")
            started = client.post("/start", json={"environment": "bisection", "key": "good", "seed": 7})
            assert started.status_code == 201, started.text
            task_id, low, high, observed = started.json()["task_id"], 1, 1000, {"turn": 0, "terminated": False}
            while not observed["terminated"]:
                guess = (low + high) // 2
                action = {"task_id": task_id, "turn": observed["turn"]}
                if action["turn"] == 3:
                    assert client.post("/pause", json={"task_id": task_id}).json()["state"] == "paused"
                    assert client.post("/resume", json={"task_id": task_id}).json()["state"] == "waiting"
                answer = client.post("/observation", json=action | {"message": _say(str(guess))})
                assert answer.status_code == 200, answer.text
                observed = answer.json()
                if observed["messages"][-1]["content"].startswith("Higher"):
                    low = guess + 1
                else:
                    high = guess - 1
            account = client.post("/end", json={"task_id": task_id}).json()
    assert account["outcome"]["kind"] == "completed"
    assert account["reward"] == 1
    assert account["metrics"] == {"solved": True, "guesses": account["turns"]}


def _say(words: str) -> dict[str, str]:
    return {"role": "assistant", "content": words}
