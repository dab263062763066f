"""`tide-env eval` as a command, against a real environment server and a small OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai_server import serving

from tide_sdk import place
from tide_sdk.cli import main

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.timeout(240)


class Evaluation:
    """Runs the command in a folder of its own; `toy_environment:Toy` is what it serves unless told otherwise."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.out = folder / "out"

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tide_sdk.cli", "eval", "--model-url", self.url, "--out", str(self.out), *words]
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            argv,
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path} | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        process = self.start(*words, **variables)
        try:
            out, _ = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, out

    def lines(self) -> list[bytes]:
        path = self.out / "results.jsonl"
        return path.read_bytes().splitlines(keepends=True) if path.is_file() else []

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture
def model():
    with serving(lambda messages: "left") as server:
        yield server


@pytest.fixture
def evaluation(tmp_path, model):
    return Evaluation(tmp_path, model.url)


def test_an_evaluation_writes_results_summary_and_report(evaluation, model):
    model.key = "a-secret"
    model.say = lambda messages: "left" if len(model.bodies) % 3 else "right"
    tasks = evaluation.folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"seed": seed, "group": f"g{seed % 2}"}) + "\n" for seed in range(6)))
    words = ["toy_environment:Toy", "--agent", "ten_lines:play", "--tasks", str(tasks), "--repeats", "3"]
    words += ["--sampling", "temperature=0.7", "--sampling", "stop=no", "--api-key-variable", "MODEL_KEY"]
    code, out = evaluation.run(*words, "--success-above", "0.6", MODEL_KEY="a-secret")
    assert code == 0, out
    records = evaluation.records()
    assert len({(record["id"], record["repeat"]) for record in records}) == len(records) == 18
    assert all(record["turns"] == 4 and len(record["messages"]) == 9 for record in records)
    summary = json.loads((evaluation.out / "summary.json").read_text())
    assert summary["complete"]
    assert set(summary["groups"]) == {"g0", "g1"}
    hits = sum(record["reward"] > 0.6 for record in records)
    assert summary["overall"]["success"]["value"] == pytest.approx(hits / 18)
    assert {body["model"] for body in model.bodies} == {"small"}, "asked from /models"
    assert {(body["temperature"], body["stop"]) for body in model.bodies} == {(0.7, "no")}
    assert "of 18 plays of 6 tasks succeeded" in out
    assert not [path for path in evaluation.out.iterdir() if b"a-secret" in path.read_bytes()]


def test_a_killed_evaluation_resumes_to_the_same_set_with_nothing_doubled(evaluation, model):
    model.delay_s = 0.03
    words = ["toy_environment:Toy", "--seeds", "0:16", "--concurrency", "3"]
    process = evaluation.start(*words)
    end_s = time.monotonic() + 60
    while len(evaluation.lines()) < 4:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end_s
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    before = [line for line in evaluation.lines() if line.endswith(b"\n")]
    assert 4 <= len(before) < 16
    with (evaluation.out / "results.jsonl").open("ab") as file:
        file.write(b'{"id":"15","repeat":0,"outco')  # as a kill in the middle of a write leaves it
    num_bodies, model.delay_s = len(model.bodies), 0.0
    code, out = evaluation.run(*words, "--resume")
    assert code == 0, out
    assert evaluation.lines()[: len(before)] == before
    assert sorted(record["seed"] for record in evaluation.records()) == list(range(16))
    assert len(model.bodies) - num_bodies == 4 * (16 - len(before)), "what was there was not played again"
    code, out = evaluation.run(*words[:-2], "--resume", "--sampling", "temperature=0.1")
    assert code == 2
    assert "sampling.temperature: null then, 0.1 now" in out


def test_failures_of_the_infrastructure_are_no_zeros_and_are_mended_by_a_resume(evaluation, model):
    words = ["toy_environment:Toy", "--seeds", "0:4", "--repeats", "2", "--attempts", "1", "--concurrency", "1"]
    model.say = lambda messages: 500 if len(model.bodies) <= 3 else "left"
    code, out = evaluation.run(*words)
    assert code == 1, out
    assert "100.0% of 5 plays" in out
    assert "5 of 8 plays have a reward" in out
    assert "3 without: infrastructure: TransportError: the model's server failed with HTTP 500" in out
    lost = [record for record in evaluation.records() if record["outcome"] == "infrastructure"]
    assert [record["reward"] for record in lost] == [None] * 3
    model.say = lambda messages: "left"
    code, out = evaluation.run(*words, "--resume")
    assert code == 0, out
    assert {record["outcome"] for record in evaluation.records()} == {"completed"}
    assert len(evaluation.lines()) == 8


def test_an_interrupted_evaluation_ends_in_order_and_reports_what_there_is(evaluation, model):
    model.delay_s = 0.05
    process = evaluation.start("toy_environment:Toy", "--seeds", "0:200", "--concurrency", "2")
    end_s = time.monotonic() + 60
    while not evaluation.lines():
        assert process.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, out
    assert "--resume" in out
    assert (evaluation.out / "report.html").is_file()
    assert not json.loads((evaluation.out / "summary.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["toy_environment:Toy"], "one of the arguments --tasks --seeds is required"),
        (["toy_environment:Toy", "--seeds", "9:3"], "--seeds: '9:3': the range is empty"),
        (["toy_environment:Nothing", "--seeds", "1"], "is not a subclass of tide_sdk.Environment"),
        (["toy", "--seeds", "1"], "'toy': --gateway says where it is"),
        (["--gateway", "http://127.0.0.1:9", "--environment", "toy", "--seeds", "1"], "no gateway answers at"),
        (["toy_environment:Toy", "--seeds", "1", "--agent", "ten_lines:nothing"], "--agent ten_lines:nothing"),
        (["toy_environment:Toy", "--seeds", "1", "--api-key-variable", "NOT_SET"], "NOT_SET is empty or not set"),
        (["toy_environment:Toy", "--seeds", "1", "--sampling", "stream=true"], "--sampling stream"),
        (["toy_environment:Toy", "--seeds", "1", "--model-url", "http://127.0.0.1:9/v1"], "no model's server answers"),
        (["toy_environment:Toy", "--seeds", "1", "--model-url", "nonsense"], "--model-url 'nonsense'"),
        (["toy_environment:Toy", "--seeds", "1", "--repeats", "0"], "--repeats must be from 1"),
        (["toy_environment:Toy", "--seeds", "1", "--task", "[1]"], "--task must be a JSON object"),
    ],
)
def test_a_wrong_call_plays_nothing_and_says_what_to_change(evaluation, model, words, told, monkeypatch):
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.chdir(evaluation.folder)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            code = main(["eval", "--model-url", model.url, "--out", str(evaluation.out), *words])
        except SystemExit as ended:
            code = ended.code
    assert code == 2
    assert told in errors.getvalue()
    assert not evaluation.out.exists()
    assert model.bodies == []


def test_of_several_models_one_must_be_named(evaluation, model):
    model.models = ("one", "two")
    code, out = evaluation.run("toy_environment:Toy", "--seeds", "1")
    assert code == 2
    assert "which model? " in out
    assert "has one, two" in out


def test_where_nothing_works_the_rest_is_left_for_a_resume(evaluation, model):
    model.say = lambda messages: 500
    code, out = evaluation.run("toy_environment:Toy", "--seeds", "0:500", "--attempts", "1", "--concurrency", "4")
    assert code == 1, out
    assert "stopped early: 20 plays in a row failed" in out
    assert len(evaluation.lines()) < 40


def test_an_evaluation_with_screenshots_records_their_names_and_sends_the_model_the_images(evaluation, model):
    tasks = evaluation.folder / "tasks.jsonl"
    task = {"turns": 12, "width": 200, "height": 100, "noisy_rows": 50}
    tasks.write_text(json.dumps({"task": task, "seed": 1}) + "\n")
    code, out = evaluation.run("screenshot_environment:Screenshots", "--tasks", str(tasks))
    assert code == 0, out
    (record,) = evaluation.records()
    assert (record["outcome"], record["turns"], len(record["messages"])) == ("completed", 12, 25)
    told = (evaluation.out / "results.jsonl").read_bytes()
    assert told.count(b"tide-blob:sha256:") == 13
    assert b"data:image" not in told + (evaluation.out / "report.html").read_bytes()
    assert len(told) < 10_000
    assert "data:image/png" in json.dumps(model.bodies[-1])


@pytest.mark.parametrize("references", [True, False])
async def test_a_gateway_is_asked_for_references_where_a_command_wants_them(references, monkeypatch):
    async def found(client, environment):
        return environment

    monkeypatch.setattr(place, "reach_gateway", found)
    there = place.place_of("toy", "http://127.0.0.1:9", None, ())
    async with place.reached(there, None, 1, references=references) as (client, environment):
        assert (client.references, environment) == (references, "toy")
