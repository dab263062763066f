"""The task scheduler under random events: the state machine of `ctb_machine`, by hypothesis and in a busy mix."""

from __future__ import annotations

import random

import pytest
from ctb_machine import SchedulerMachine
from hypothesis import settings

SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", range(6))
def test_long_random_runs_keep_every_invariant(seed: int) -> None:
    """The same rules, in the mix of a busy rollout, where the small budget keeps many tasks paused."""
    choose = random.Random(seed)
    machine = SchedulerMachine()
    machine.start(
        choose.choice([0.0, 0.3]), choose.choice(["tiers", "weighted"]), seed % 2 == 0, seed % 3 > 0, seed > 3
    )
    machine.add_rank(1)
    for _ in range(2500):
        pick, dice = choose.randrange(10**6), choose.random()
        if dice < 0.1 and len(machine.tasks) < 40:
            machine.submit_group(
                choose.randint(1, 4),
                choose.random() < 0.2,
                choose.choice(["e0", "e1"]),
                choose.choice([None] * 5 + [0]),
            )
        elif dice < 0.5 and machine.in_phase("admitted", "acting"):
            machine.call(pick, choose.choice([0, 10, 40]), choose.randint(1, 30))
        elif dice < 0.53 and machine.tasks:
            machine.report(pick, choose.randrange(40), choose.choice([None, 90, 10**6]), choose.random() < 0.5)
        elif dice < 0.55 and machine.in_phase("generating", "paused", "refused"):
            machine.abort(pick)
        elif dice < 0.85 and machine.in_phase("generating"):
            machine.turn(pick, choose.random())
        elif dice < 0.9 and machine.in_phase("acting", "refused"):
            machine.end(pick)
        elif dice < 0.92:
            machine.wait(choose.random() * 4)
        elif dice < 0.94:
            for _ in machine.in_phase("generating"):
                machine.turn(0, 1.0)
            if machine.closed:
                machine.open_gate(choose.choice([8, 8, pick % 7 + 1]), choose.random() < 0.7)
            else:
                machine.close_gate(choose.choice([8, pick % 7 + 1]))
        elif dice < 0.95:
            machine.limit_environment(choose.choice(["e0", "e1"]), choose.choice([None, 3, 8]))
        elif dice < 0.96:
            machine.add_rank(choose.randrange(3), choose.random() < 0.2)
        elif dice < 0.963 and machine.ranks:
            machine.measure(pick, choose.randrange(200, 340))
        elif dice < 0.968 and machine.ranks:
            machine.remove_rank(pick)
        elif dice < 0.98 and machine.in_phase("queued"):
            machine.withdraw(pick)
        machine.the_scheduler_agrees()
    view = machine.scheduler.view()
    assert min(view.num_pauses, view.num_resumes) > 50
    machine.teardown()
