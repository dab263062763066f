"""No paused task starves: how long a task waits has a bound."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.plan import Pause, Resume
from tide_trainer.scheduling.settings import CtbSettings

MAX_WAIT_S, GENERATE_S, ACT_S = 3.0, 0.1, 0.5
# The environment's times are exponential; none of these runs draws a longer one.
LONGEST_ACT_S = 12 * ACT_S


@pytest.mark.parametrize("seed", range(8))
def test_a_wait_is_bounded_by_max_wait_and_a_turn_for_each_that_waited_longer(roll_out, make_workload, seed) -> None:
    """From `max_wait_s` on a call goes first, and the room that falls free is kept for it.

    So at the latest when every other task of its rank has made one more call or ended, it is resumed; and so is each
    that waited longer, before it.
    """
    workload = make_workload(num_groups=12, num_turns=10, num_eval_groups=seed % 2, generate_s=GENERATE_S, act_s=ACT_S)
    settings = CtbSettings(max_wait_s=MAX_WAIT_S, growth_fraction=(0.0, 1.0)[seed % 2], priority="tiers")
    outcome = roll_out(workload, budget_tokens=500, seed=seed, settings=settings)
    paused: dict[str, float] = {}
    waits: list[tuple[float, float]] = []
    for now_s, decision in outcome.decisions:
        if isinstance(decision, Pause):
            paused[decision.task] = now_s
        elif isinstance(decision, Resume):
            since_s = paused.pop(decision.task)
            waits.append((since_s, now_s))
            if decision.task.startswith("eval"):
                continue
            due_s = since_s + MAX_WAIT_S
            ahead = sum(began_s <= since_s and until_s > due_s for began_s, until_s in waits)
            assert now_s - due_s <= ahead * (LONGEST_ACT_S + 2 * GENERATE_S), f"{ahead} waited longer"
    assert len(waits) > 10
    assert not paused
