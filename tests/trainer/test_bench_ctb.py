"""The benchmark of task scheduling: its tasks, its perfect cache, its driver against an engine, its verdicts."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ctb_workload
import pytest
from ctb_driver import Driver
from ctb_figures import RunFigures, figures_of, worst_window
from ctb_plan import CELLS, MAIN, factory_of, policy_names, runs_of
from ctb_plot import plot
from ctb_report import result_of, strongest_fixed, table
from ctb_workload import BenchTask, ideal_prefill_tokens, make_tasks

from tide_trainer.backends.fake_core import FakeCore, FakeSettings
from tide_trainer.types import Completion, EngineStats, Sampling

BLOCK = 32
LIMIT_S = 60.0
VOCABULARY = 200


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctb_workload, "VOCABULARY", VOCABULARY)


class InProcess:
    """The fake engine behind the calls that the driver makes."""

    def __init__(self, folder: Path, kv_tokens: int) -> None:
        data = struct.pack(f"<{VOCABULARY}f", *[0.0] * VOCABULARY) * VOCABULARY
        head = json.dumps(
            {"logits": {"dtype": "F32", "shape": [VOCABULARY, VOCABULARY], "data_offsets": [0, len(data)]}}
        ).encode()
        path = folder / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(head)) + head + data)
        self._core = FakeCore(FakeSettings(str(path), kv_tokens=kv_tokens, max_context_tokens=2048))
        self._ids = itertools.count()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self._core.generate(str(next(self._ids)), list(prompt_ids), sampling, 0)

    async def stats(self) -> EngineStats:
        return self._core.stats()


def small_tasks(seed: int = 1) -> list[BenchTask]:
    return make_tasks(seed, num_groups=3, group_size=4, mean_latency_s=0.001)


async def play(engine: InProcess, policy: str, tasks: list[BenchTask], kv_tokens: int) -> RunFigures:
    made = factory_of(policy, CELLS[MAIN])(kv_tokens, BLOCK, 1)
    driver, before = Driver(engine, made, tasks, kv_tokens), await engine.stats()
    await driver.run(LIMIT_S)
    return figures_of((MAIN, policy, 1), driver, tasks, (kv_tokens, BLOCK), (before, await engine.stats()), (1.0, 1.0))


def test_the_same_seed_makes_the_same_tasks_and_another_one_others() -> None:
    assert small_tasks() == small_tasks()
    assert small_tasks(2) != small_tasks()
    tasks = make_tasks(1, num_groups=10, group_size=8, mean_latency_s=0.5)
    assert sorted({len(task.turns) for task in tasks}) == list(range(3, 11))
    assert len({task.prompt_ids for task in tasks}) == 10


def test_a_cache_of_8_tasks_holds_8_tasks_of_mean_final_length() -> None:
    tasks = make_tasks(1, num_groups=10, group_size=8, mean_latency_s=0.5)
    mean = sum(task.final_tokens for task in tasks) / len(tasks)
    assert CELLS[MAIN].kv_tokens / mean == pytest.approx(8, abs=0.4)


@pytest.mark.parametrize("policy", ["ctb", "fixed-4", "aimd", "algorithm-1"])
async def test_a_large_cache_computes_what_a_perfect_one_does(policy: str, tmp_path: Path) -> None:
    tasks = small_tasks()
    run = await play(InProcess(tmp_path, 65_536), policy, tasks, 65_536)
    # Siblings that start while their group's first prompt is being computed do not find it yet.
    late = sum(len(task.prompt_ids) for task in tasks if task.uid.endswith("/0")) * 3
    assert run.ideal_prefilled_tokens <= run.prefilled_tokens <= run.ideal_prefilled_tokens + late
    if policy == "ctb":
        assert run.prefill_over_ideal < 1.2


async def test_a_run_on_a_cache_that_was_not_reset_is_refused(tmp_path: Path) -> None:
    engine = InProcess(tmp_path, 65_536)
    await play(engine, "fixed-4", small_tasks(), 65_536)
    with pytest.raises(RuntimeError, match="no reset"):
        await play(engine, "fixed-4", small_tasks(), 65_536)


def test_runs_are_interleaved_and_every_policy_is_played_once_per_seed() -> None:
    cell = CELLS[MAIN]
    names = policy_names(cell)
    runs = list(runs_of(cell, (1, 2), names))
    assert [run.seed for run in runs] == [1] * len(names) + [2] * len(names)
    assert sorted(run.policy for run in runs[: len(names)]) == sorted(names)
    assert runs[0].policy != runs[len(names)].policy
    with pytest.raises(ValueError, match="fixed-N"):
        factory_of("fixed-none", cell)


def figures(policy: str, seed: int, tasks_per_minute: float, cell: str = MAIN) -> RunFigures:
    values = dict.fromkeys(RunFigures.__dataclass_fields__, 0)
    values |= {"cell": cell, "policy": policy, "seed": seed, "tasks_per_minute": tasks_per_minute}
    return RunFigures(**(values | {"hit_rate": 0.82, "ideal_hit_rate": 0.84, "prefill_over_ideal": 1.1}))


def some_runs() -> list[RunFigures]:
    speeds = {"ctb": 50.0, "fixed-8": 40.0, "fixed-12": 49.0, "fixed-all": 30.0}
    runs = [figures(policy, seed, speed) for seed in (11, 12, 13) for policy, speed in speeds.items()]
    # On the tuning seed another one is the strongest: that one is compared with.
    return [figures("fixed-8", 1, 60.0), figures("fixed-12", 1, 50.0), *runs]


def test_the_strongest_fixed_one_is_chosen_on_other_seeds_than_are_compared() -> None:
    runs = some_runs()
    assert strongest_fixed(runs) == "fixed-8"
    result = result_of(runs, 1.0)
    assert result["value"] == pytest.approx(50 / 40)
    assert result["holds"] is True
    assert json.loads(json.dumps(result))["details"]["strongest_fixed"] == "fixed-8"
    assert table(runs).row_count == 4
    assert plot(runs).startswith("<svg")
    assert "ctb" in plot(runs)


@pytest.mark.parametrize(
    "change", [{"preemptions": 1}, {"hit_rate": 0.79}, {"prefill_over_ideal": 1.21}, {"tasks_per_minute": 39.0}]
)
def test_every_goal_can_be_missed(change: dict[str, float]) -> None:
    runs = [replace(run, **change) if run.policy == "ctb" else run for run in some_runs()]
    assert result_of(runs, 1.0)["holds"] is False


def test_another_cell_is_missed_below_nine_tenths_of_its_best() -> None:
    slow = [figures("ctb", 11, 8.0, "cache-4"), figures("fixed-4", 11, 10.0, "cache-4")]
    result = result_of([*some_runs(), *slow], 1.0)
    assert result["holds"] is False
    assert result["details"]["other_cells"]["cache-4"]["ratio"] == pytest.approx(0.8)


async def test_the_worst_window_is_no_better_than_the_whole(tmp_path: Path) -> None:
    tasks = small_tasks()
    made = factory_of("fixed-12", CELLS[MAIN])(1280, BLOCK, 1)
    driver = Driver(InProcess(tmp_path, 1280), made, tasks, 1280)
    await driver.run(LIMIT_S)
    whole = sum(turn.cached_tokens for turn in driver.turns) / sum(turn.prompt_tokens for turn in driver.turns)
    assert 0 <= worst_window(driver.turns) <= whole
    prefilled = sum(turn.prompt_tokens - turn.cached_tokens for turn in driver.turns)
    assert prefilled > 1.5 * ideal_prefill_tokens(tasks, BLOCK)
