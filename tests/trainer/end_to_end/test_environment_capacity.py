"""A gateway that holds fewer tasks than the run wants: starts wait in the scheduler's queue, and none is lost."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("interval_s", [0, 0.2])
def test_six_tasks_on_two_slots_all_train_without_a_lost_attempt(project, interval_s):
    project.environment_delay(0.01)
    registry = project.folder / "environments.toml"
    registry.write_text(registry.read_text().replace("capacity = 256", "capacity = 2"))
    wanted = ["algorithm.groups_per_batch=3", "algorithm.group_size=2", "algorithm.eta=0", "agent.max_attempts=1"]
    wanted += [f"gateway.capacity_interval_s={interval_s}", "tasks.num_eval=2", "scheduler.probe=false"]
    wanted += ["rollout.watch.interval_s=0.1"]
    code, out = project.run("--max-steps", "1", *(word for setting in wanted for word in ("--set", setting)))
    assert code == 0, out[-3000:]
    step, end = project.last("train_step"), project.last("end")
    assert step["num_sequences"] == 6
    assert end["account"]["trained"] == 3
    assert not any("infrastructure" in reason for reason in end["account"])
    if not interval_s:
        assert step["num_requeues"] > 0, "nobody asked the gateway, so that some starts must find no place"
    log = (project.folder / "runs" / "toy" / "logs" / "main.log").read_text()
    assert "alarm" not in log
    assert "attempt" not in {record["event"] for record in project.records()}
    assert step["kv_measured"] <= step["kv_usage"] <= 1
    assert project.left_over() == []
