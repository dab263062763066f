"""What a train step costs and how long a success of .90 takes, beside TRL on the same task: `make bench-train`.

Both systems start from the same warm-started model, train with the same groups, seeds, reward, learning rate and loss,
and run in turn, alone on two cores. The last line is JSON: {"name", "value", "unit", "goal", "holds", "details"}.

Time to .90: wall seconds from the start of training (model warm-started, engine up) to the end of the first train step
whose model reaches .90 sampled success on the held-out seeds. Models are measured after the runs, by one yardstick, so
no measurement takes time from either; TideRL's run also saves a checkpoint each train step for it, in its own time.

    make bench-train ARGS="--quick"                 three train steps, no goal
    make bench-train ARGS="--seeds 1,2,3 --rounds 2"
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tide_run
import trl_run
from processes import ROOT, run_command
from train_curve import TimedRun, measured
from train_report import differences, table

QUICK_STEPS = 3
PROBE_STEPS = 3
YARDSTICK = str(ROOT / "benchmarks" / "babyai_success.py")
YARDSTICK_TIMEOUT_S = 900.0
GOAL = 1.0
GET_PEER = "run make bench-train-peers, which makes .venv-trl, to measure TRL beside it"


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    arguments = _arguments()
    # Ends what runs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cores = sorted(os.sched_getaffinity(0))[: arguments.cores]
    os.sched_setaffinity(0, cores)
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-train-", dir=arguments.directory or ROOT / "runs"))
    say(f"{len(cores)} cores; the runs' files are in {folder}")
    runs, warm_starts, variant, probes = _measure(arguments, folder)
    result: dict[str, Any] = {"name": "train", **_result(arguments, runs)}
    ours = [run for run in runs if run.system == "TideRL"]
    peers = [run for run in runs if run.system != "TideRL"]
    for some in (ours, peers):
        if some:
            print(table(some), flush=True)
    result["details"] |= {
        "target_success": arguments.target,
        "held_out_episodes": _num_episodes(arguments),
        "cores": len(cores),
        "warm_start_success": warm_starts,
        "trl_processes_x_threads": str(variant) if variant else None,
        "trl_wall_s_per_train_step_by_processes_x_threads": probes,
        "differences": differences(_settings(arguments, arguments.seeds[0])),
        "runs": [run.record() for run in runs],
    }
    line = json.dumps({name: result[name] for name in ("name", "value", "unit", "goal", "holds", "details")})
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


def say(text: str) -> None:
    """Tells the progress."""
    print(f"bench-train: {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three train steps, 50 held-out episodes, no goal")
    parser.add_argument("--seeds", type=_seeds, default=[1], help="run.seed of each comparison, for example 1,2,3")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each system and seed, in turn")
    parser.add_argument("--steps", type=int, help="train steps of a run; default: the quickstart's")
    parser.add_argument("--target", type=float, default=0.9, help="success that is waited for")
    parser.add_argument("--cores", type=int, default=2, help="cores for whichever system runs")
    parser.add_argument(
        "--trl", default="auto", choices=["auto", "none", *map(str, trl_run.VARIANTS)], help="TRL's processes x threads"
    )
    parser.add_argument(
        "--trl-plain", action="store_true", help="TRL as it is unasked: every episode has all its turns (a weaker peer)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="setting of the quickstart")
    parser.add_argument("--directory", type=Path, help="where the run's folder is made; default: runs/")
    parser.add_argument("--out", type=Path, help="file that takes the last line too")
    return parser.parse_args()


def _seeds(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _settings(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    return tide_run.settings_of([*arguments.set, f"run.seed={seed}"])


def _num_steps(arguments: argparse.Namespace) -> int:
    default = QUICK_STEPS if arguments.quick else _settings(arguments, 1)["run"]["max_train_steps"]
    return arguments.steps or default


def _num_episodes(arguments: argparse.Namespace) -> int:
    return 50 if arguments.quick else _settings(arguments, 1)["tasks"]["num_eval"]


def _measure(
    arguments: argparse.Namespace, folder: Path
) -> tuple[list[TimedRun], dict[int, Any], trl_run.Variant | None, dict[str, float]]:
    """All runs in their order, with their models measured."""
    with_peer = trl_run.present() and arguments.trl != "none"
    if not with_peer:
        say(GET_PEER)
    runs: list[TimedRun] = []
    warm_starts: dict[int, Any] = {}
    variant, probes = None, {}
    num_steps = _num_steps(arguments)
    for seed in arguments.seeds:
        place = folder / f"seed{seed}"
        place.mkdir()
        overrides = [*arguments.set, f"run.seed={seed}"]
        settings = tide_run.settings_of(overrides)
        say(f"seed {seed}: warm start")
        model, success = tide_run.warm_start(place, overrides)
        yardstick = Yardstick(place, model, settings, _num_episodes(arguments), arguments.target)
        warm_starts[seed] = {"yardstick": yardstick.successes([model / "model.safetensors"])[0], **success}
        say(f"seed {seed}: warm-started success {warm_starts[seed]}")
        if with_peer and variant is None:
            variant, probes = _fastest(arguments, place, model, settings)
        for number in range(1, arguments.rounds + 1):
            runs.append(tide_run.timed_run(place, f"tide{number}", model, seed, overrides, num_steps))
            _tell(runs, yardstick)
            if variant is not None:
                name, plain = f"trl{number}", arguments.trl_plain
                runs.append(trl_run.timed_run(place, name, model, settings, num_steps, variant, plain=plain))
                _tell(runs, yardstick)
    return runs, warm_starts, variant, probes


class Yardstick:
    """Measures a seed's models, in a process of its own each time.

    Args:
        place: the seed's folder.
        model: the warm-started model's folder.
        settings: the resolved quickstart.
        num_episodes: held-out seeds.
        target: success after which nothing more is measured.
    """

    def __init__(self, place: Path, model: Path, settings: dict[str, Any], num_episodes: int, target: float) -> None:
        self.target = target
        self._out, self._log = place / "yardstick.json", place / "yardstick.log"
        told = place / "settings.json"
        told.write_text(json.dumps(settings), encoding="utf-8")
        self._argv = [sys.executable, YARDSTICK, "--settings", str(told), "--model", str(model)]
        self._argv += ["--episodes", str(num_episodes), "--target", str(target), "--out", str(self._out)]

    def successes(self, weights: Sequence[Path]) -> list[float]:
        """Sampled success of each, up to the first that reaches the target."""
        run_command([*self._argv, *map(str, weights)], self._log, timeout_s=YARDSTICK_TIMEOUT_S)
        return json.loads(self._out.read_text(encoding="utf-8"))


def _tell(runs: list[TimedRun], yardstick: Yardstick) -> None:
    """Measures the models of the last run, in its place in the list."""
    last = runs[-1]
    numbers = [step.number for step in last.steps]
    found = yardstick.successes([last.snapshots[number] for number in numbers])
    runs[-1] = last = measured(last, dict(zip(numbers, found, strict=False)), yardstick.target)
    step_s = last.figures()["wall_s_per_train_step"]
    reached = "never" if last.time_to_target_s is None else f"{last.time_to_target_s:.1f} s, step {last.reached_step}"
    curve = " ".join(f"{value:.2f}" for value in found)
    say(f"seed {last.seed}: {last.system}: {step_s:.2f} s a train step; {yardstick.target:g}: {reached}; {curve}")


def _fastest(
    arguments: argparse.Namespace, place: Path, model: Path, settings: dict[str, Any]
) -> tuple[trl_run.Variant, dict[str, float]]:
    """TRL's quickest use of the cores on this machine, by a few train steps of each; the cold first is not counted."""
    if arguments.trl != "auto":
        return trl_run.variant(arguments.trl), {}
    seconds: dict[trl_run.Variant, float] = {}
    for one in trl_run.VARIANTS:
        say(f"TRL on {one} (processes x threads)")
        probe = trl_run.timed_run(place, f"probe-{one}", model, settings, PROBE_STEPS, one, plain=arguments.trl_plain)
        seconds[one] = statistics.fmean(step.wall_s for step in probe.steps[1:])
    return min(seconds, key=seconds.__getitem__), {str(one): value for one, value in seconds.items()}


def _result(arguments: argparse.Namespace, runs: Sequence[TimedRun]) -> dict[str, Any]:
    """The headline: the ratio of the times to the target, each the median over seeds and rounds."""
    ours = [run for run in runs if run.system == "TideRL"]
    peers = [run for run in runs if run.system != "TideRL"]
    per_turn_ms = statistics.median(
        sum(run.figures()["part_cpu_ms_per_turn"][part] for part in ("scheduler", "router", "gateway")) for run in ours
    )
    details: dict[str, Any] = {"scheduler_router_gateway_cpu_ms_per_turn": per_turn_ms}
    print(f"scheduler + router + gateway: {per_turn_ms:.2f} ms of CPU a turn (a later goal: 2)")
    if arguments.quick:
        speeds = [
            statistics.median(run.figures()["wall_s_per_train_step"] for run in some) if some else None
            for some in (ours, peers)
        ]
        unit = "wall time of a train step, TideRL / TRL" if peers else "s of wall time a train step"
        value = speeds[0] / speeds[1] if speeds[0] and speeds[1] else speeds[0]
        return {"value": value, "unit": unit, "goal": None, "holds": None, "details": details}
    our_s = [run.time_to_target_s for run in ours]
    time_s = statistics.median(one for one in our_s if one is not None) if None not in our_s else None
    details["time_to_target_s"] = {"TideRL": time_s}
    if not peers:
        details["peer"] = GET_PEER
        return {"value": time_s, "unit": "s to the target", "goal": None, "holds": None, "details": details}
    # A peer that never got there counts with its whole run, which is less than it would have needed.
    peer_s = statistics.median(run.time_to_target_s or run.steps[-1].ended_s for run in peers)
    details["time_to_target_s"]["TRL"] = peer_s
    details["trl_runs_that_never_reached_it"] = sum(run.time_to_target_s is None for run in peers)
    value = None if time_s is None else time_s / peer_s
    unit = f"wall time to {arguments.target:g} sampled success, TideRL / TRL"
    return {
        "value": value,
        "unit": unit,
        "goal": GOAL,
        "holds": value is not None and value <= GOAL,
        "details": details,
    }


if __name__ == "__main__":
    sys.exit(main())
