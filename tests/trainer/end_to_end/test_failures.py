from __future__ import annotations

import os
import signal
import sqlite3
import time

import pytest

pytestmark = pytest.mark.timeout(240)
STOP_LIMIT_S = 15


def phase(name):
    return lambda records: any(record["event"] == "phase" and record["phase"] == name for record in records)


def trained(records):
    return any(record["event"] == "train_step" for record in records)


@pytest.mark.parametrize(
    ("moment", "number"),
    [(phase("booting"), signal.SIGINT), (phase("training"), signal.SIGTERM), (trained, signal.SIGINT)],
    ids=["booting", "training", "trained"],
)
def test_a_signal_at_any_moment_ends_the_run_in_order(project, moment, number):
    project.environment_delay(0.05)
    process = project.start("--max-steps", "1000")
    project.wait_for(process, moment)
    began_s = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=STOP_LIMIT_S)
    assert time.monotonic() - began_s < STOP_LIMIT_S
    assert process.returncode == 130
    assert project.left_over() == []
    end = project.last("end")
    assert end["status"] == "stopped"
    folder = project.folder / "runs" / "toy"
    assert (folder / "report.html").is_file()
    with sqlite3.connect(folder / "trainer.sqlite3") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        assert database.execute("select status from runs").fetchall() == [("stopped",)]
        open_groups = database.execute("select count(*) from groups where status in ('running', 'ready')").fetchone()
        (taken,) = database.execute("select count(*) from groups").fetchone()
    assert open_groups == (0,)
    assert sum(end["account"].values()) == taken


def test_two_signals_do_not_tear_the_end(project):
    project.environment_delay(0.05)
    process = project.start("--max-steps", "1000")
    project.wait_for(process, trained)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=STOP_LIMIT_S)
    assert project.last("end")["status"] == "stopped"
    assert project.left_over() == []


def test_r4_the_death_of_the_only_engine_fails_the_run_and_is_named(project):
    process = project.start("--max-steps", "1000")
    project.wait_for(process, trained)
    (engine,) = project.children("fake_server")
    os.kill(engine, signal.SIGKILL)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rollout:0" in project.last("end")["reason"]
    assert "rollout:0" in out
    assert project.left_over() == []


def test_r4_with_a_second_rank_the_run_goes_on_and_its_tasks_are_placed_anew(project):
    process = project.start("--max-steps", "6", "--set", "rollout.num_ranks=2")
    project.wait_for(process, trained)
    os.kill(project.children("fake_server")[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out[-3000:]
    end = project.last("end")
    assert end["account"]["trained"] == 24
    assert not any("infrastructure" in reason for reason in end["account"])
    assert len(project.last("train_step")["roles"]) == 2


@pytest.mark.parametrize(
    ("part", "name"), [("tide_trainer.router", "router"), ("tide_gateway", "gateway"), ("agent_worker", "worker-0")]
)
def test_the_death_of_a_part_that_the_run_cannot_miss_fails_it_and_is_named(project, part, name):
    process = project.start("--max-steps", "1000")
    project.wait_for(process, trained)
    os.kill(project.children(part)[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out[-3000:]
    end = project.last("end")
    assert end["status"] == "failed"
    assert f"{name} ended with exit code -9" in end["reason"]
    assert project.left_over() == []


def test_r6_nothing_is_left_when_the_main_process_is_killed(project):
    process = project.start("--max-steps", "1000")
    project.wait_for(process, trained)
    process.kill()
    process.wait()
    assert project.left_over(STOP_LIMIT_S) == []
    code, out = project.run("--max-steps", "1")
    assert code == 0, out[-3000:]


def test_s4_failing_tasks_neither_stop_a_train_step_nor_become_reward_zero(project):
    """5% of tasks fail by the agent's bug, 5% by the environment's, and an engine dies with calls in flight."""
    project.environment_delay(0.02, fail_every=20)
    kept = ["agent.entry=toy_environment:flaky", "rollout.num_ranks=2", "evaluation.every_train_steps=0"]
    process = project.start("--max-steps", "5", *(word for setting in kept for word in ("--set", setting)))
    project.wait_for(process, trained)
    os.kill(project.children("fake_server")[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out[-3000:]
    assert len([record for record in project.records() if record["event"] == "train_step"]) == 5
    folder = project.folder / "runs" / "toy"
    with sqlite3.connect(folder / "trainer.sqlite3") as database:
        taken = database.execute("select status, reason from groups").fetchall()
        played = database.execute("select outcome, reward is null, count(*) from trajectories group by 1, 2").fetchall()
        used = database.execute("select sum(status = 'trained') from groups").fetchone()
    assert sum(project.last("end")["account"].values()) == len(taken)
    assert used == (5 * 4,)
    assert all(reason for status, reason in taken if status != "trained")
    assert {status for status, _ in taken} <= {"trained", "dropped"}
    # What failed has no reward at all, and what has none failed.
    assert {outcome for outcome, without, _ in played if without} == {"agent_error"}
    assert {outcome for outcome, without, _ in played if not without} == {"completed"}
    failed = sum(num for outcome, _, num in played if outcome == "agent_error")
    assert 0 < failed < 0.2 * sum(num for *_, num in played)
    # The environment's and the engine's failures were there, and another attempt mended each.
    with sqlite3.connect(folder / "gateway.sqlite3") as database:
        (broken,) = database.execute(
            "select count(*) from tasks where cast(outcome as text) like '%failed%'"
        ).fetchone()
    assert broken > 0
    assert len(project.last("train_step")["roles"]) == 2
