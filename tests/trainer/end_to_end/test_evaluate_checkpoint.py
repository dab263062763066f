"""`tide-train eval` on the fake engine: a checkpoint folder, the held-out seeds, the files of an evaluation."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

pytestmark = pytest.mark.timeout(240)


def evaluated(folder):
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads((folder / "summary.json").read_text())


@pytest.fixture
def checkpoint(project, toy_model):
    return ["--checkpoint", str(toy_model), "--out", str(project.folder / "out")]


def test_a_checkpoint_is_sampled_and_decoded_greedily_on_the_held_out_seeds(project, checkpoint):
    code, out = project.run(*checkpoint, "--way", "both", "--repeats", "3", command="eval")
    assert code == 0, out[-3000:]
    records, summary = evaluated(project.folder / "out" / "sampled")
    assert len({(record["id"], record["repeat"]) for record in records}) == len(records) == 16 * 3
    assert {record["outcome"] for record in records} == {"completed"}
    assert {record["seed"] for record in records} == set(range(1000, 1016))
    assert all(record["messages"][-1]["content"] == "over" and record["turns"] == 4 for record in records)
    assert len({record["reward"] for record in records}) > 1, "sampled plays differ"
    assert summary["complete"]
    assert list(summary["overall"]["pass_at"]) == ["1", "2", "3"]
    greedy, _ = evaluated(project.folder / "out" / "greedy")
    assert len(greedy) == 16
    assert len({record["reward"] for record in greedy}) == 1, "greedy plays of one prompt are alike"
    assert (project.folder / "out" / "greedy" / "report.html").is_file()
    assert not (project.folder / "runs").exists()
    assert project.left_over() == []


def test_a_killed_evaluation_goes_on_with_what_is_missing(project, checkpoint):
    project.environment_delay(0.3)
    small = ["--set", "agent.max_tasks_per_worker=2"]
    process = project.start(*checkpoint, *small, command="eval")
    results = project.folder / "out" / "sampled" / "results.jsonl"
    end_s = time.monotonic() + 60
    while not (results.is_file() and results.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.stdout.read()[-3000:]
        assert time.monotonic() < end_s
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = results.read_bytes().splitlines()
    assert 2 <= len(before) < 16
    assert project.left_over(15) == []
    project.environment_delay(0)
    code, out = project.run(*checkpoint, "--resume", command="eval")
    assert code == 0, out[-3000:]
    after = results.read_bytes().splitlines()
    assert after[: len(before)] == before
    assert sorted(json.loads(line)["seed"] for line in after) == list(range(1000, 1016))

    code, out = project.run(*checkpoint, "--resume", "--set", "rollout.max_new_tokens=1", command="eval")
    assert code == 2
    assert "sampling.max_new_tokens: 2 then, 1 now" in out


def test_a_folder_without_a_model_is_refused(project):
    code, out = project.run("--checkpoint", str(project.folder), command="eval")
    assert code == 2
    assert "--checkpoint" in out
    assert "runs/NAME/checkpoint" in out


def test_an_agent_with_a_bug_leaves_an_incomplete_evaluation(project, checkpoint):
    code, out = project.run(*checkpoint, "--set", "agent.entry=toy_environment:broken", command="eval")
    assert code == 1
    assert "0 of 16 plays have a reward" in out
    assert "a bug in the agent" in out


def test_a_failed_boot_leaves_the_folder_free(project, checkpoint):
    code, out = project.run(*checkpoint, "--set", "rollout.ready_timeout_s=0.01", command="eval")
    assert code == 1, out[-3000:]
    assert (project.folder / "out" / "sessions").is_dir(), "it came as far as the boot"
    assert not list((project.folder / "out").glob("*/manifest.json"))
