"""Whole runs on the fakes whose evaluations outlive weight syncs."""

from __future__ import annotations

import os
import signal
import sqlite3

import pytest

from tide_trainer.report.recorded import read_recorded

pytestmark = pytest.mark.timeout(240)


def steps_done(num):
    return lambda records: sum(record["event"] == "train_step" for record in records) >= num


ROOM = "scheduler.default_prior={prompt_tokens=4, final_tokens=16}"
"""Evaluation tasks that cannot end leave room for training ones."""


def setting(*words: str) -> list[str]:
    return [part for word in words for part in ("--set", word)]


def evaluations(project, kind="sampled"):
    found = [record for record in project.records() if record["event"] == "evaluation" and record["kind"] == kind]
    return {record["model_version"]: record for record in found}


def check_versions(project):
    """Every recorded evaluation task was sampled at its own version alone, and filed under it."""
    folder = project.folder / "runs" / "toy" / "trajectories"
    recorded = {path.stem: read_recorded(path) for path in folder.glob("eval.*.json")}
    assert recorded
    for name, record in recorded.items():
        assert {turn.model_version for turn in record.turns} == {int(name.split(".")[1])}, name
    return recorded


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_r8_an_evaluation_that_spans_syncs_keeps_a_rank_at_its_version_which_then_joins(project, num_ranks):
    """The evaluation of version 0 cannot end before three train steps are done."""
    flag = project.folder / "go on"
    project.environment_delay(0, eval_flag=flag)
    wanted = setting(
        f"rollout.num_ranks={num_ranks}", "evaluation.every_train_steps=0", "evaluation.num_samples=16", ROOM
    )
    process = project.start("--max-steps", "6", *wanted)
    project.wait_for(process, steps_done(3))
    flag.touch()
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out[-3000:]
    steps = [record for record in project.records() if record["event"] == "train_step"]
    assert [record["model_version"] for record in steps] == list(range(1, 7))
    (kept,) = steps[0]["kept_ranks"]
    assert [step["kept_ranks"] for step in steps[:3]] == [[kept]] * 3
    measured = evaluations(project)
    assert list(measured) == [0, 6]
    for record in (*measured.values(), *evaluations(project, "greedy").values()):
        assert (record["num"], record["num_total"], record["num_mixed"]) == (16, 16, 0)
        assert not record["partial"]
    assert (measured[0]["kept_rank"], measured[6]["kept_rank"]) == (kept, "")
    recorded = check_versions(project)
    assert len(recorded) == 32
    # The kept rank joined: at the end all ranks are there, and sample the last version.
    assert len(steps[-1]["roles"]) == num_ranks + 1
    assert {turn.rank for name, record in recorded.items() if name.startswith("eval.6") for turn in record.turns} == {
        f"rollout:{index}" for index in range(num_ranks)
    }
    end = project.last("end")
    assert end["account"]["trained"] == 6 * 4
    assert end["largest_staleness"] <= 1
    assert end["parity_max_abs"] <= end["parity_tolerance"]
    with sqlite3.connect(project.folder / "runs" / "toy" / "trainer.sqlite3") as database:
        assert database.execute("select count(*) from groups where status = 'trained'").fetchone() == (24,)


def test_with_one_rank_the_sync_waits_the_grace_and_the_evaluation_is_partial(project):
    project.environment_delay(0, eval_flag=project.folder / "never")
    wanted = setting("evaluation.grace_s=0.5", "evaluation.timeout_s=1", "evaluation.every_train_steps=0")
    code, out = project.run("--max-steps", "2", *wanted)
    assert code == 0, out[-3000:]
    measured = evaluations(project)
    assert list(measured) == [0, 2]
    for record in measured.values():
        assert (record["num"], record["num_total"], record["partial"]) == (0, 16, True)
    assert project.left_over() == []


def test_r4_a_kept_rank_that_dies_leaves_a_partial_evaluation_and_the_run_goes_on(project):
    flag = project.folder / "go on"
    project.environment_delay(0, eval_flag=flag)
    wanted = setting("rollout.num_ranks=2", "evaluation.every_train_steps=0", "evaluation.greedy=never", ROOM)
    process = project.start("--max-steps", "5", *wanted)
    project.wait_for(process, lambda records: any(record.get("kept_ranks") for record in records))
    kept = next(record["kept_ranks"][0] for record in project.records() if record.get("kept_ranks"))
    (engine,) = project.children(f"rollout-{kept.replace(':', '-')}.settings")
    os.kill(engine, signal.SIGKILL)
    project.wait_for(process, lambda records: any(record["event"] == "evaluation" for record in records))
    flag.touch()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out[-3000:]
    first = evaluations(project)[0]
    assert (first["num"], first["num_total"], first["partial"], first["num_mixed"]) == (0, 16, True, 0)
    assert first["kept_rank"] == kept
    assert not evaluations(project)[5]["partial"]
    assert len([record for record in project.records() if record["event"] == "train_step"]) == 5
    assert project.last("train_step")["roles"].keys() == {"actor:0", f"rollout:{1 - int(kept[-1])}"}
