"""What the live export of KV blocks costs vLLM's scheduler: CPU of one step, and of one look.

Runs the real engine core with a tiny model in this process, `--requests` of them decoding at once, and takes the CPU of
the engine's own thread around `schedule`: `TideScheduler`'s and the stock `Scheduler`'s, step by step in turn. The last
line is JSON: {"name", "value", "unit", "goal", "holds", "details"}.

    .venv/bin/python benchmarks/bench_engine_export.py --requests 128
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

NAME = "engine-export"
GOAL = 0.001
"""Share of one core that looks may take at one a second: far below what any run can tell from noise."""
WORDS = [f"word{number}" for number in range(64)]


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=200, help="steps measured with each scheduler")
    arguments = parser.parse_args()
    from tide_trainer.backends import vllm_settings

    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(folder, arguments.requests)
        os.environ |= vllm_settings.environment(settings)
        stock_s, ours_s, look_s = _measure(settings, arguments.requests, arguments.steps)
    line = {
        "name": NAME,
        "value": round(look_s, 6),
        "unit": "share of one core taken by a look a second",
        "goal": GOAL,
        "holds": look_s <= GOAL,
        "details": {
            "requests": arguments.requests,
            "stock_step_us": round(1e6 * stock_s, 1),
            "our_step_us": round(1e6 * ours_s, 1),
            "look_us": round(1e6 * look_s, 1),
        },
    }
    print(json.dumps(line))
    return 0


def _settings(folder: str, num_requests: int) -> Any:
    from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model
    from tide_trainer.backends.vllm_settings import VllmSettings

    model = make_tiny_model(folder, WORDS, TinyModel(hidden=32, layers=1))
    return VllmSettings(str(model), kv_tokens=num_requests * 1024, max_context_tokens=1024, max_running=num_requests)


def _measure(settings: Any, num_requests: int, num_steps: int) -> tuple[float, float, float]:
    from vllm.v1.core.sched.scheduler import Scheduler

    from tide_trainer.backends import vllm_build
    from tide_trainer.types import Sampling

    core = vllm_build.build(settings, None)
    requests = vllm_build.Requests(core, ())
    for number in range(num_requests):
        prompt = [3 + (number + place) % 50 for place in range(64)]
        core.add_request(requests.make(f"c{number}", prompt, Sampling(max_new_tokens=900), 0, None))
    scheduler = core.scheduler
    spent: dict[str, list[float]] = {"stock": [], "ours": []}
    ours = scheduler.schedule
    for step in range(2 * num_steps + 20):
        which = "ours" if step % 2 else "stock"
        schedule = ours if step % 2 else Scheduler.schedule.__get__(scheduler)
        seen: list[float] = []
        scheduler.schedule = _timed(schedule, seen)
        _, executed = core.step_fn()
        core.post_step(executed)
        if step >= 20:
            spent[which].append(seen[0])
    looks: list[float] = []
    look = _timed(lambda: (scheduler.live_requests(), scheduler.counts(), scheduler.num_cached_blocks()), looks)
    for _ in range(num_steps):
        look()
    if len(scheduler.live_requests()) != num_requests:
        raise RuntimeError("requests ended before the measurement did: lower --steps")
    return median(spent["stock"]), median(spent["ours"]), median(looks)


def _timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        try:
            return work(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - began_s)

    return timed


if __name__ == "__main__":
    sys.exit(main())
