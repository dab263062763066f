from __future__ import annotations

import asyncio

from loop_fakes import ScriptedRunner, trajectory

from tide_trainer.loop.evaluation import RunningEvaluation
from tide_trainer.loop.prompts import held_out


async def test_success_is_the_share_of_rewarded_tasks_above_zero(settings):
    runner = ScriptedRunner(lambda p, g, m, a: trajectory(g, m, [1.0, 0.0, 0.4, 0.0][m]))
    running = RunningEvaluation(runner, held_out(settings.tasks), 7, greedy=False, max_attempts=1)
    result = await running.result(5)
    assert (result.success, result.num, result.num_total, result.partial) == (0.5, 4, 4, False)
    assert result.model_version == 7
    assert runner.temperatures == [1.0] * 4
    assert result.record()["kind"] == "sampled"


async def test_greedy_samples_at_temperature_zero(settings):
    runner = ScriptedRunner(lambda p, g, m, a: trajectory(g, m))
    await RunningEvaluation(runner, held_out(settings.tasks), 0, greedy=True, max_attempts=1).result(5)
    assert runner.temperatures == [0.0] * 4


async def test_after_the_grace_the_rest_is_aborted_and_the_result_is_tagged_partial(settings):
    never = asyncio.get_running_loop().create_future()
    runner = ScriptedRunner(lambda p, g, m, a: trajectory(g, m) if m < 3 else never)
    running = RunningEvaluation(runner, held_out(settings.tasks), 0, greedy=False, max_attempts=1)
    result = await running.result(0.05)
    assert (result.num, result.num_total, result.partial) == (3, 4, True)
    assert runner.cancelled == 1


async def test_a_failed_task_is_left_out_and_never_counts_as_reward_zero(settings):
    runner = ScriptedRunner(lambda p, g, m, a: trajectory(g, m, 1.0 if m else None, outcome="infrastructure"))
    running = RunningEvaluation(runner, held_out(settings.tasks), 0, greedy=False, max_attempts=2)
    result = await running.result(5)
    assert (result.success, result.num, result.partial) == (1.0, 3, True)
    assert sum(member == 0 for _, member, _ in runner.started) == 2
