"""The quickstart as a timed run: `tide-train` itself, its own records, and a snapshot of each train step's weights."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import run_command
from train_curve import TimedRun, TrainStep

from tide_trainer.config_file import load
from tide_trainer.report.metrics import read_metrics

CONFIG = "examples/quickstart.toml"
TIDE_TRAIN = str(Path(sys.executable).with_name("tide-train"))
MODEL_FILES = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
TIMEOUT_S = 1800.0
# No measurement inside the timed run: one held-out task at its start and its end is the least that it takes.
UNMEASURED = ("evaluation.every_train_steps=0", "evaluation.greedy=never", "tasks.num_eval=1")


def settings_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The quickstart as resolved."""
    return load(CONFIG, overrides).model_dump(mode="json")


def warm_start(folder: Path, overrides: Sequence[str]) -> tuple[Path, dict[str, float]]:
    """Runs `tide-train sft`; returns a plain model folder for both systems, and the success that was measured.

    Only the model goes along: moments of another objective would favour the system that can read them.
    """
    _tide_train("sft", folder, "sft", overrides)
    checkpoint, model = folder / "sft" / "checkpoint", folder / "model"
    model.mkdir()
    for name in [*MODEL_FILES.split(), "chat_template.jinja"]:
        shutil.copyfile(checkpoint / name, model / name)
    last = [record for record in read_metrics(folder / "sft" / "metrics.jsonl") if record["event"] == "warm_start"][-1]
    return model, {kind: last[f"{kind}_success"] for kind in ("sampled", "greedy")}


def timed_run(folder: Path, name: str, model: Path, seed: int, overrides: Sequence[str], num_steps: int) -> TimedRun:
    """One run from a warm-started model.

    A checkpoint is saved after each train step, which costs this system some time; the files are linked while it runs.

    Raises:
        RuntimeError: the run failed, or a train step's weights were missed.
    """
    snapshots = _Snapshots(folder / name / "checkpoint", folder / f"{name}-snapshots")
    sets = (
        *overrides,
        *UNMEASURED,
        f'model.path="{model}"',
        "warm_start.enabled=false",
        "train.checkpoint_every=1",
        f"run.max_train_steps={num_steps}",
    )
    _tide_train("run", folder, name, sets, watch=snapshots.take)
    records = read_metrics(folder / name / "metrics.jsonl")
    steps = _steps(records, _trained(folder / name / "trainer.sqlite3"))
    missing = [step.number for step in steps if step.number not in snapshots.taken]
    if missing or len(steps) != num_steps:
        raise RuntimeError(f"{folder / name}: {len(steps)} of {num_steps} train steps, no weights of {missing}")
    end = next(record for record in records if record["event"] == "end")
    return TimedRun("TideRL", seed, steps, end["peak_rss_bytes"], snapshots.taken)


class _Snapshots:
    """Keeps the weights of every checkpoint that comes and goes, by hard link."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self.taken: dict[int, Path] = {}

    def take(self) -> None:
        """Links the present checkpoint's weights; quick, and safe while the run replaces the folder."""
        try:
            version = self._version()
            if version in self.taken:
                return
            self._folder.mkdir(exist_ok=True)
            part = self._folder / "part"
            part.unlink(missing_ok=True)
            os.link(self._checkpoint / "model.safetensors", part)
            # Replaced between the two reads: the next call takes what is there then.
            if self._version() == version:
                self.taken[version] = part.rename(self._folder / f"{version}.safetensors")
        except (FileNotFoundError, json.JSONDecodeError):
            return

    def _version(self) -> int:
        return int(json.loads((self._checkpoint / "extra.json").read_text(encoding="utf-8"))["model_version"])


def _tide_train(command: str, folder: Path, name: str, sets: Sequence[str], **watch: Any) -> None:
    settings = [f'run.directory="{folder}"', f'run.name="{name}"', *sets]
    flags = [flag for one in settings for flag in ("--set", one)]
    run_command([TIDE_TRAIN, command, CONFIG, *flags], folder / f"{name}.log", timeout_s=TIMEOUT_S, **watch)


def _trained(database: Path) -> dict[int, tuple[int, int]]:
    """Buffer version -> tokens and turns of the episodes that its train step trained on."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute(
            "SELECT g.buffer_version, SUM(t.num_tokens), SUM(t.turns) FROM trajectories t"
            " JOIN groups g ON g.uid = t.\"group\" WHERE g.status = 'trained' GROUP BY g.buffer_version"
        ).fetchall()
    return {version: (tokens, turns) for version, tokens, turns in rows}


def _steps(records: Sequence[dict[str, Any]], trained: dict[int, tuple[int, int]]) -> list[TrainStep]:
    began_s = next(r["time_s"] for r in records if r["event"] == "phase" and r["phase"] == "training")
    steps: list[TrainStep] = []
    before_s = began_s
    for record in (record for record in records if record["event"] == "train_step"):
        tokens, turns = trained[record["model_version"] - 1]
        cpu_s = dict(record["cpu_s"])
        # The scheduler is a part of the main process.
        cpu_s["scheduler"] = record["scheduler_cpu_s"]
        cpu_s["main"] -= record["scheduler_cpu_s"]
        steps.append(
            TrainStep(
                number=record["model_version"],
                ended_s=record["time_s"] - began_s,
                wall_s=record["time_s"] - before_s,
                cpu_s=cpu_s,
                part_wall_s={
                    "waiting for rollout": record["training_wait_s"],
                    "training": record["train_wall_s"],
                    "sync": record["sync_wall_s"],
                    "rollout waiting for training": record["rollout_wait_s"],
                },
                num_tokens=tokens,
                num_sampled_tokens=record["num_trained_tokens"],
                num_trained_turns=turns,
                num_turns=record["num_turns"],
            )
        )
        before_s = record["time_s"]
    return steps
