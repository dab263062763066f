"""CTB beside fixed concurrencies, an AIMD controller and the paper's Algorithm 1, on a real vLLM: `make bench-ctb`.

80 tasks in groups of 8 with a shared prompt and 3 to 10 turns play against one vLLM server with a model of 20 M
parameters and a cache of about 8 tasks of final length; environments take 0.5 s a turn. Other cells change the cache or
the environments. Runs are interleaved, each begins with an empty cache, and the strongest fixed concurrency is chosen
on other seeds than those compared. The last line is JSON: {"name", "value", "unit", "goal", "holds", "details"}.

    make bench-ctb ARGS="--quick"                                  the main cell with one seed and five policies
    make bench-ctb ARGS="--cell main --policy ctb,fixed-12 --seeds 1,2"
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ctb_plot
import ctb_report
from ctb_driver import Driver
from ctb_engine import BLOCK_TOKENS, BenchEngine, make_model
from ctb_figures import RunFigures, figures_of
from ctb_plan import (
    CELLS,
    GROUP_SIZE,
    MAIN,
    QUICK,
    SEEDS,
    TUNED,
    TUNING_SEEDS,
    Cell,
    Run,
    factory_of,
    policy_names,
    runs_of,
)
from ctb_workload import make_tasks
from processes import ROOT
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

RUN_TIMEOUT_S = 900.0
RESULT = ROOT / "docs" / "results" / "bench-ctb.json"


def main() -> int:
    """Runs the benchmark; the exit code."""
    arguments = _arguments()
    began_s = time.monotonic()
    runs = _plan(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-ctb-") as name:
        folder = Path(name)
        model = make_model(folder)
        figures = asyncio.run(_play(arguments, runs, model, folder))
    result = ctb_report.result_of(figures, time.monotonic() - began_s)
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        arguments.out.with_suffix(".svg").write_text(ctb_plot.plot(figures), encoding="utf-8")
    Console(stderr=True).print(ctb_report.table(figures))
    print(line)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the main cell with its first seed and five policies")
    parser.add_argument("--cell", default="", help=f"only these of {', '.join(CELLS)}, for example main,cache-4")
    parser.add_argument("--policy", default="", help="only these: ctb, aimd, algorithm-1, fixed-N, fixed-all")
    parser.add_argument("--seeds", default="", help="seeds of every cell, for example 1,2 (0 to 3 are for tuning)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the engine's forward pass")
    parser.add_argument("--trace", type=Path, help="file that takes each run's samples and turns, one JSON a line")
    parser.add_argument("--out", type=Path, help="file that takes the result, and beside it the plot")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cell.split(",") if name and name not in CELLS]
    if unknown:
        parser.error(f"--cell {','.join(unknown)}: give some of {', '.join(CELLS)}")
    if not (arguments.quick or arguments.cell or arguments.policy or arguments.seeds or arguments.out):
        arguments.out = RESULT
    return arguments


def _plan(arguments: argparse.Namespace) -> list[Run]:
    """All runs in their order."""
    only = [MAIN] if arguments.quick else [name for name in arguments.cell.split(",") if name] or list(CELLS)
    given = [int(seed) for seed in arguments.seeds.split(",") if seed]
    names = [name for name in arguments.policy.split(",") if name]
    runs: list[Run] = []
    for name in only:
        cell = CELLS[name]
        chosen = names or (list(QUICK) if arguments.quick else policy_names(cell))
        if given or arguments.quick or name != MAIN:
            runs += runs_of(cell, given or SEEDS[:1], chosen)
            continue
        tuned = [policy for policy in chosen if policy in TUNED]
        runs += [*runs_of(cell, TUNING_SEEDS, tuned), *runs_of(cell, SEEDS, chosen)]
    for run in runs:
        factory_of(run.policy, run.cell)
    return runs


async def _play(arguments: argparse.Namespace, runs: Sequence[Run], model: Path, folder: Path) -> list[RunFigures]:
    """Plays all runs; one engine is booted for each size of the cache."""
    figures: list[RunFigures] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("runs", total=len(runs))
        for kv_tokens in dict.fromkeys(run.cell.kv_tokens for run in runs):
            engine = BenchEngine(model, kv_tokens, arguments.threads, folder)
            now = progress.add_task(f"boot of an engine with {kv_tokens} tokens", total=None)
            try:
                await engine.start()
                for run in (run for run in runs if run.cell.kv_tokens == kv_tokens):
                    progress.update(
                        now,
                        description=f"{run.cell.name} seed {run.seed} {run.policy}",
                        total=run.cell.num_tasks,
                        completed=0,
                    )
                    figures.append(await _run(run, engine, arguments.trace, partial(progress.advance, now)))
                    progress.advance(whole)
                    console.print(_said(figures[-1]), highlight=False, soft_wrap=True)
            finally:
                progress.remove_task(now)
                await engine.stop()
    return figures


async def _run(run: Run, engine: BenchEngine, trace: Path | None, on_end: Any) -> RunFigures:
    cell: Cell = run.cell
    tasks = make_tasks(run.seed, num_groups=cell.num_groups, group_size=GROUP_SIZE, mean_latency_s=cell.latency_s)
    kv_tokens = engine.info.kv_tokens
    policy = factory_of(run.policy, cell)(kv_tokens, engine.info.block_tokens, 1)
    driver = Driver(engine.client, policy, tasks, kv_tokens, on_end=on_end)
    # A collection of this process's garbage in the middle of a run would be the policy's misfortune.
    gc.collect()
    before = await engine.reset()
    engine_cpu_s, driver_cpu_s = engine.cpu_s(), time.process_time()
    await driver.run(RUN_TIMEOUT_S)
    cpu_s = (engine.cpu_s() - engine_cpu_s, time.process_time() - driver_cpu_s)
    after = await engine.client.stats()
    if trace is not None:
        _write_trace(trace, run, driver)
    name = (cell.name, run.policy, run.seed)
    return figures_of(name, driver, tasks, (kv_tokens, BLOCK_TOKENS), (before, after), cpu_s)


def _write_trace(path: Path, run: Run, driver: Driver) -> None:
    line = {
        "cell": run.cell.name,
        "policy": run.policy,
        "seed": run.seed,
        "samples": [asdict(sample) for sample in driver.samples],
        "turns": [asdict(turn) for turn in driver.turns],
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _said(run: RunFigures) -> str:
    return (
        f"{run.cell:11} seed {run.seed:2} {run.policy:11} {run.tasks_per_minute:6.1f} tasks/min  hit {run.hit_rate:.3f}"
        f" (worst {run.worst_window:.2f})  prefill {run.prefill_over_ideal:.2f} of ideal  {run.preemptions} preempted"
        f"  {run.pauses} pauses  engine {run.engine_cpu_s:.1f} CPU s"
    )


if __name__ == "__main__":
    sys.exit(main())
