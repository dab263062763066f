"""TRL as a timed run: starts trl_babyai.py in `.venv-trl` and reads what it wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import ROOT, run_command
from train_curve import TimedRun, TrainStep

PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SCRIPT = str(ROOT / "benchmarks" / "trl_babyai.py")
TIMEOUT_S = 1800.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """How TRL uses the cores: data-parallel processes, and torch threads of each."""

    num_processes: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.num_processes}x{self.num_threads}"


VARIANTS = (Variant(1, 1), Variant(1, 2), Variant(2, 1))


def variant(text: str) -> Variant:
    """The variant that is written so."""
    return next(one for one in VARIANTS if str(one) == text)


def present() -> bool:
    """Whether `make bench-train-peers` was run."""
    return PYTHON.exists()


def timed_run(
    folder: Path, name: str, model: Path, settings: dict[str, Any], num_steps: int, variant: Variant, *, plain: bool
) -> TimedRun:
    """One run from a warm-started model; `plain` as in trl_babyai.py.

    Raises:
        RuntimeError: the run failed or ended early.
    """
    out = folder / name
    out.mkdir()
    told = out / "settings.json"
    told.write_text(json.dumps(settings), encoding="utf-8")
    many = variant.num_processes > 1
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={variant.num_processes}"]
    argv = [str(PYTHON), *(launcher if many else []), SCRIPT, "--settings", str(told), "--model", str(model)]
    argv += ["--out", str(out), "--max-steps", str(num_steps), "--threads", str(variant.num_threads)]
    argv += ["--plain"] if plain else []
    # Idle OpenMP threads that spin would take the cores that the working ones need.
    env = QUIET | {"OMP_NUM_THREADS": str(variant.num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    run_command(argv, folder / f"{name}.log", timeout_s=TIMEOUT_S, env=env)
    ranks = [_lines(out / f"rank{rank}.jsonl") for rank in range(variant.num_processes)]
    if any(len(lines) != num_steps for lines in ranks):
        raise RuntimeError(f"{out}: {[len(lines) for lines in ranks]} train steps instead of {num_steps}")
    snapshots = {step: out / "snapshots" / f"{step}.safetensors" for step in range(1, num_steps + 1)}
    peak = sum(lines[-1]["peak_rss_bytes"] for lines in ranks)
    steps = [_step(number, ranks) for number in range(1, num_steps + 1)]
    return TimedRun(
        f"TRL {variant}{' plain' if plain else ''}", settings["run"]["seed"], steps, {"all": peak}, snapshots
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _step(number: int, ranks: Sequence[Sequence[dict[str, Any]]]) -> TrainStep:
    """The train step's own figures out of sums since the start; walls are the slowest process's."""

    def own(lines: Sequence[dict[str, Any]], name: str) -> float:
        return lines[number - 1][name] - (lines[number - 2][name] if number > 1 else 0)

    def total(name: str) -> int:
        return int(sum(own(lines, name) for lines in ranks))

    wall_s, rollout_s, environment_s = (
        max(own(lines, name) for lines in ranks) for name in ("wall_s", "rollout_wall_s", "environment_wall_s")
    )
    return TrainStep(
        number=number,
        ended_s=max(lines[number - 1]["wall_s"] for lines in ranks),
        wall_s=wall_s,
        cpu_s={"all": sum(own(lines, "cpu_s") for lines in ranks)},
        part_wall_s={
            "environment": environment_s,
            "rest of rollout": rollout_s - environment_s,
            "training": wall_s - rollout_s,
        },
        num_tokens=total("num_tokens"),
        num_sampled_tokens=total("num_sampled_tokens"),
        num_trained_turns=total("num_turns"),
        num_turns=total("num_turns"),
    )
