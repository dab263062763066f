"""The same ten-line agent against a gateway alone, in an evaluation, and in training, without a change to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ten_lines
from gateway_process import place
from openai_server import serving

from tide_sdk import ModelEndpoint, run

SUPPORT = Path(__file__).parents[2] / "support"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def path():
    """Where child processes find the toy and the agent."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))}


@pytest.fixture
def gateway(project, path):
    """A gateway of its own that hosts the toy; its URL."""
    replica = place(project.folder, 0)
    argv = [sys.executable, "-m", "tide_gateway.cli", "serve", "--config", str(project.folder / "environments.toml")]
    argv += ["--port", str(replica.port), "--announce", str(replica.announce), "--outlive-s", "0"]
    argv += ["--database", f"sqlite:///{project.folder / 'gateway.sqlite3'}"]
    replica.start(argv, os.environ | path)
    replica.wait_ready()
    yield replica.url
    replica.stop()
    replica.free_port()


def test_the_agent_is_ten_lines():
    assert len(Path(ten_lines.__file__).read_text().splitlines()) <= 10


def test_it_plays_against_a_gateway_alone_and_is_evaluated_there(project, gateway, path):
    with serving(lambda messages: "left") as model:
        endpoint = ModelEndpoint(model.url, model="small")
        results = run(ten_lines.play, environment="toy", gateway=gateway, model=endpoint, seeds=range(4))
        assert [(result.outcome, result.reward, result.turns) for result in results] == [("completed", 1.0, 4)] * 4
        out = project.folder / "out"
        argv = [sys.executable, "-m", "tide_sdk.cli", "eval", "--gateway", gateway, "--environment", "toy"]
        argv += ["--agent", "ten_lines:play", "--model-url", model.url, "--seeds", "0:4", "--out", str(out)]
        done = subprocess.run(argv, env=os.environ | path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(record["outcome"], record["reward"], record["turns"]) for record in records] == [("completed", 1.0, 4)] * 4


def test_it_trains(project):
    code, out = project.run("--max-steps", "1", "--set", "agent.entry=ten_lines:play", "--set", "tasks.num_eval=4")
    assert code == 0, out[-3000:]
    assert project.last("end")["account"]["trained"] == 4
    assert project.last("evaluation")["num"] == 4
