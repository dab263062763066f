from __future__ import annotations

import sqlite3
import tomllib

import pytest

from tide_trainer.report.recorded import read_recorded
from tide_trainer.report.replay import pauses, replay

pytestmark = pytest.mark.timeout(240)


def test_a_run_learns_accounts_for_every_prompt_and_leaves_its_files(project):
    code, out = project.run("--max-steps", "8", "--set", "model.path=", "--set", "model.words=toy_environment:words")
    assert code == 0, out[-3000:]
    end = project.last("end")
    folder = project.folder / "runs" / "toy"
    assert end["status"] == "completed"
    assert end["account"]["trained"] == 8 * 4
    assert end["largest_staleness"] <= 1
    assert end["parity_max_abs"] <= end["parity_tolerance"]
    with sqlite3.connect(folder / "trainer.sqlite3") as database:
        statuses = dict(database.execute("select status, count(*) from groups group by status"))
        (taken,) = database.execute("select count(*) from groups").fetchone()
    assert set(statuses) <= {"trained", "dropped"}
    assert sum(end["account"].values()) == taken
    sampled = [r["success"] for r in project.records() if r["event"] == "evaluation" and r["kind"] == "sampled"]
    assert sampled[0] < 0.8 < sampled[-1]
    for name in ("config.toml", "metrics.jsonl", "report.html", "checkpoint/model.safetensors"):
        assert (folder / name).is_file(), name
    assert tomllib.loads((folder / "config.toml").read_text())["run"]["max_train_steps"] == 8
    assert project.left_over() == []

    code, out = project.run("--max-steps", "1")
    assert code == 0, out[-3000:]
    assert len([r for r in project.records("toy-2") if r["event"] == "train_step"]) == 1


@pytest.mark.parametrize(("steps", "eta"), [(1, 0), (2, 2), (3, 0)])
def test_a_run_ends_at_its_last_train_step_with_a_final_evaluation(project, steps, eta):
    code, out = project.run("--max-steps", str(steps), "--set", f"algorithm.eta={eta}")
    assert code == 0, out[-3000:]
    trained = [record for record in project.records() if record["event"] == "train_step"]
    assert [record["model_version"] for record in trained] == list(range(1, steps + 1))
    assert all(record["staleness_max"] <= eta for record in trained)
    assert project.last("evaluation")["model_version"] == steps
    assert project.last("end")["largest_staleness"] <= eta


def test_a_cache_too_small_for_all_pauses_and_resumes_and_ends_as_well(project):
    project.environment_delay(0.02)
    small = ["rollout.kv_tokens=64", "rollout.block_tokens=4", "rollout.max_context_tokens=48"]
    # Admitted on what they hold now, so that their growth has to be met by pauses.
    small += ["scheduler.growth_fraction=0", "scheduler.default_prior={prompt_tokens=4, final_tokens=4}"]
    small += ["report.trajectories_every=1", "report.num_trajectories=4"]
    code, out = project.run("--max-steps", "3", *(word for setting in small for word in ("--set", setting)))
    assert code == 0, out[-3000:]
    steps = [record for record in project.records() if record["event"] == "train_step"]
    assert sum(step["num_pauses"] for step in steps) > 0
    assert sum(step["num_resumes"] for step in steps) > 0
    assert project.last("end")["account"]["trained"] == 12
    check_recordings(project.folder / "runs" / "toy")
    with sqlite3.connect(project.folder / "runs" / "toy" / "gateway.sqlite3") as database:
        (open_tasks,) = database.execute("select count(*) from tasks where state not in ('ended', 'done')").fetchone()
    assert open_tasks == 0


def check_recordings(folder):
    """What the run recorded of its trajectories is whole, says why tasks were paused, and has its pages."""
    found = {path.stem: read_recorded(path) for path in (folder / "trajectories").glob("*.json")}
    assert {f"eval.{version}.sampled.{member}" for version in (0, 2, 3) for member in (0, 1)} <= found.keys()
    assert sum(record.kind == "train" for record in found.values()) >= 4
    paused = [one for record in found.values() for one in pauses(record)]
    assert paused
    assert all(one.end_s >= one.start_s and one.reason and one.resumed for one in paused)
    for record in found.values():
        assert len(record.turns) == len(record.rewards) == record.num_turns == 4
        assert sum(reward or 0 for reward in record.rewards) == record.reward
        assert not any(item.notes for item in replay(record).items)
        assert [turn.call_s for turn in record.turns] == sorted(turn.call_s for turn in record.turns)
        assert all(turn.budget_tokens and turn.reason and turn.rank == "rollout:0" for turn in record.turns)
    report = (folder / "report.html").read_text()
    for name in found:
        assert f'href="trajectories/{name}.html"' in report
        assert (folder / "trajectories" / f"{name}.html").is_file()


def test_the_warm_start_stops_on_success_and_sft_saves_it(project):
    warm = ["warm_start.enabled=true", "warm_start.demonstrator=tide_environments.babyai.agents:expert"]
    warm += ["warm_start.num_episodes=16", "warm_start.learning_rate=0.05", "warm_start.num_eval=16"]
    warm += ["warm_start.first_evaluation=2", "warm_start.steps_between_evaluations=2"]
    code, out = project.run(*(word for setting in warm for word in ("--set", setting)), command="sft")
    assert code == 0, out[-3000:]
    measured = [r["sampled_success"] for r in project.records() if r["event"] == "warm_start"]
    measured = [success for success in measured if success is not None]
    assert measured[-1] >= 0.45
    assert all(success < 0.45 for success in measured[:-1])
    assert (project.folder / "runs" / "toy" / "checkpoint" / "model.safetensors").is_file()


def test_a_broken_agent_ends_the_run_with_its_error(project):
    code, out = project.run("--set", "agent.entry=toy_environment:broken")
    assert code == 1
    assert "agent_error" in out
    assert "a bug in the agent" in project.last("end")["reason"]
    assert project.last("end")["status"] == "failed"
    assert (project.folder / "runs" / "toy" / "report.html").is_file()
    assert project.left_over() == []
