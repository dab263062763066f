"""A synthetic run, from a seed: what a quickstart's records look like."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Record = dict[str, Any]
CPU_PARTS = {
    "vllm": 3.1,
    "training": 2.2,
    "environment": 0.9,
    "router": 0.6,
    "gateway": 0.5,
    "agent": 0.4,
    "scheduler": 0.1,
}


class ManualClock:
    """Seconds that move only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _config(num_steps: int, eta: int) -> Record:
    return {
        "run": {"name": "quickstart", "max_train_steps": num_steps, "target_success": 0.9, "seed": 1},
        "tasks": {"environment": "babyai", "parameters": {"level": "BabyAI-GoToObj-v0"}, "num_eval": 200},
        "algorithm": {"eta": eta, "groups_per_batch": 16, "group_size": 8, "loss": {"kind": "grpo", "clip": 0.2}},
        "train": {"learning_rate": 0.001, "betas": [0.9, 0.95]},
    }


def synthetic_records(num_steps: int = 30, *, eta: int = 1, seed: int = 7, level: float = 0.94) -> list[Record]:
    """A run that learns: success climbs from about .52 to `level`."""
    rng = random.Random(seed)
    clock_s = 0.0
    records: list[Record] = []

    def add(event: str, passed_s: float = 0.0, **fields: Any) -> None:
        nonlocal clock_s
        clock_s += passed_s
        records.append({"event": event, "time_s": round(clock_s, 3), **fields})

    def success_at(version: float) -> float:
        return level - (level - 0.52) * math.exp(-version / (num_steps / 4))

    def evaluate(version: int, kind: str, shift: float) -> None:
        success = sum(rng.random() < min(0.99, success_at(version) + shift) for _ in range(200)) / 200
        reward = success * 0.72
        turns = 20 - 13 * success
        add("evaluation", 2, model_version=version, kind=kind, success=success, num=200, num_total=200,
            mean_reward=reward, mean_turns=turns, partial=False)  # fmt: skip

    add("run", name="quickstart", config=_config(num_steps, eta), started_at="2025-11-04T09:30:00Z")
    add("phase", phase="booting")
    add("phase", 50, phase="recording demonstrations")
    add("phase", 8, phase="warm start")
    for step in range(5, 41, 5):
        measured = step >= 10 and step % 10 == 0
        add("warm_start", 2, supervised_step=step, loss=2.4 * math.exp(-step / 14) + 0.2,
            sampled_success=0.13 * step / 10 if measured else None,
            greedy_success=0.19 * step / 10 if measured else None)  # fmt: skip
    add("phase", phase="training")
    evaluate(0, "sampled", 0.0)
    evaluate(0, "greedy", 0.24)
    for version in range(1, num_steps + 1):
        success = min(1.0, max(0.0, rng.gauss(success_at(version - 1), 0.045)))
        add("train_step", rng.uniform(4, 6), model_version=version, mean_reward=success * 0.7, success=success,
            mean_turns=20 - 13 * success, staleness_mean=rng.uniform(0.2, 0.9) * eta, staleness_max=eta,
            loss=rng.gauss(0.0, 0.02), grad_norm=rng.uniform(0.4, 1.4), entropy=1.1 * math.exp(-version / 12) + 0.1,
            num_sequences=128, num_trained_tokens=max(900, 2600 - 30 * version),
            goodput_tokens_per_s=rng.uniform(420, 520),
            generated_tokens=2700, hit_rate=rng.uniform(0.88, 0.95), train_wall_s=rng.uniform(1.4, 1.9),
            sync_wall_s=rng.uniform(0.2, 0.4), training_wait_s=rng.uniform(0.5, 1.5),
            rollout_wait_s=rng.uniform(0.1, 0.8), parity_max_abs=rng.uniform(1e-5, 9e-5),
            num_pauses=rng.randint(0, 30), num_resumes=rng.randint(0, 30), num_aborts=rng.randint(0, 3),
            num_requeues=version % 3, kv_usage=0.7 + version % 4 / 10, kv_measured=0.4 + version % 3 / 10,
            mode="one", roles={"local:0": "actor", "local:1": "rollout"},
            cpu_s={part: amount * rng.uniform(0.8, 1.2) for part, amount in CPU_PARTS.items()},
            num_turns=1000)  # fmt: skip
        if version % 5 == 0:
            evaluate(version, "sampled", 0.0)
    add("phase", phase="final evaluation")
    evaluate(num_steps, "greedy", 0.04)
    add("end", 1, status="completed", reason="max_train_steps",
        account={"trained": 16 * num_steps, "dropped: all rewards equal": 41, "dropped: environment_lost": 2},
        largest_staleness=eta, eta=eta, parity_max_abs=9e-5, parity_tolerance=1e-3, wall_s=clock_s,
        cpu_s={part: amount * num_steps for part, amount in CPU_PARTS.items()},
        peak_rss_bytes={"vllm": 2.4e9, "training": 0.9e9, "gateway": 1.1e8, "router": 0.8e8})  # fmt: skip
    return records


def synthetic_samples(num_seeds: int = 2) -> list[Record]:
    """Trajectories of the same seeds before and after training."""
    rng = random.Random(3)
    samples: list[Record] = []
    actions = ["turn left", "turn right", "go forward", "pick up", "go forward"]
    for when, turns, reward, certainty in (("before", 8, 0.0, 0.5), ("after", 4, 0.82, 0.96)):
        for seed in range(1000, 1000 + num_seeds):
            messages: list[Record] = [
                {"role": "system", "content": "You walk through a grid. Reply with one action."},
                {"role": "user", "content": "Mission: go to the red ball. You see a red ball 2 steps forward, 1 left."},
            ]
            tokens: list[Record] = [
                {"text": word + " ", "logprob": None, "sampled": False, "version": -1}
                for message in messages
                for word in message["content"].split()
            ]
            for turn in range(turns):
                reply = actions[(turn + seed) % len(actions)]
                messages.append({"role": "assistant", "content": reply})
                messages.append({"role": "user", "content": f"You see a wall {turn + 1} steps forward."})
                for word in [*reply.split(), "<end>"]:
                    share = min(0.999, max(0.004, rng.gauss(certainty, 0.3)))
                    tokens.append({"text": word + " ", "logprob": math.log(share), "sampled": True,
                                   "version": 0 if when == "before" else 30})  # fmt: skip
                tokens += [
                    {"text": word + " ", "logprob": None, "sampled": False, "version": -1}
                    for word in messages[-1]["content"].split()
                ]
            samples.append({"when": when, "uid": f"eval/{seed}/0", "seed": seed, "reward": reward,
                            "outcome": "completed" if reward else "truncated", "turns": turns,
                            "messages": messages, "tokens": tokens})  # fmt: skip
    return samples


def write_run(folder: Path, records: list[Record], samples: list[Record] | None = None) -> Path:
    """Writes a run's folder as the loop leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if samples is not None:
        (folder / "samples.json").write_text(json.dumps(samples))
    return folder


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def records() -> list[Record]:
    return synthetic_records()


@pytest.fixture
def make_records() -> Callable[..., list[Record]]:
    return synthetic_records


@pytest.fixture
def samples() -> list[Record]:
    return synthetic_samples()


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes records and samples into a fresh run folder."""

    def make(records: list[Record], samples: list[Record] | None = None) -> Path:
        return write_run(tmp_path / "quickstart", records, samples)

    return make
