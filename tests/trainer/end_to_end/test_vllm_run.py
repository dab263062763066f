from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tide_trainer.report.metrics import read_metrics

ROOT = Path(__file__).parents[3]
SMALL = [
    "algorithm.groups_per_batch=4",
    "algorithm.group_size=4",
    "tasks.num_eval=16",
    "warm_start.num_episodes=60",
    "warm_start.num_eval=16",
    "warm_start.first_evaluation=12",
    "warm_start.min_success=0",
    "warm_start.max_success=1",
    # About six final-length episodes fit: the others are paused.
    "rollout.kv_tokens=768",
    "rollout.max_context_tokens=320",
    "scheduler.growth_fraction=0",
]


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_the_quickstart_in_small_on_vllm_with_a_cache_too_small_for_all(tmp_path):
    settings = [f"run.directory={tmp_path}/runs", *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "tide_trainer.cli", "run", "examples/quickstart.toml", "--max-steps", "3"]
        + [word for setting in settings for word in ("--set", setting)],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tmp_path / "runs" / "quickstart"
    records = read_metrics(folder / "metrics.jsonl")
    end = records[-1]
    steps = [record for record in records if record["event"] == "train_step"]
    assert len(steps) == 3
    assert end["account"]["trained"] == 12
    assert 0 < end["parity_max_abs"] <= end["parity_tolerance"]
    assert end["largest_staleness"] <= end["eta"] == 1
    # The trainer's own log-probs of what was sampled at the same version differ by rounding alone.
    assert steps[0]["logprob_gap_max"] < 1e-3
    assert sum(step["num_pauses"] for step in steps) > 0
    assert sum(step["num_resumes"] for step in steps) > 0
    paused_clocks_stand_still(folder / "gateway.sqlite3")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "checkpoint")
    assert model.config.vocab_size == len(tokenizer)


def paused_clocks_stand_still(path):
    """The `active` clock of every paused task counted exactly the time in which it was not paused."""
    with sqlite3.connect(path) as database:
        events = database.execute("select task_id, kind, at_s from task_events order by id").fetchall()
        consumed_s = dict(database.execute("select task_id, active_consumed_s from tasks"))
    tasks: dict[str, list[tuple[str, float]]] = {}
    for task, kind, at_s in events:
        tasks.setdefault(task, []).append((kind, at_s))
    checked = 0
    for task, told in tasks.items():
        kinds = [kind for kind, _ in told]
        if "paused" not in kinds or "done" not in kinds:
            continue
        at = dict(told)
        pauses = [at_s for kind, at_s in told if kind == "paused"]
        resumes = [at_s for kind, at_s in told if kind == "waiting"]
        paused_s = sum(resumed - paused for paused, resumed in zip(pauses, resumes, strict=True))
        assert paused_s > 0
        assert consumed_s[task] == pytest.approx(at["done"] - at["started"] - paused_s, abs=0.01)
        checked += 1
    assert checked > 0
