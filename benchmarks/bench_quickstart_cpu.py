"""What a turn of the quickstart costs in CPU, by part: `make bench-quickstart-cpu`.

Runs `tide-train run examples/quickstart.toml` for a few train steps and reads what the run itself recorded. The goal is
of scheduler, router and gateway together. The last line is JSON: {"name", "value", "unit", "goal", "holds", "details"}.

    make bench-quickstart-cpu ARGS="--steps 3"
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from processes import ROOT, run_command
from tide_run import CONFIG, TIDE_TRAIN, TIMEOUT_S, UNMEASURED

from tide_trainer.report.metrics import read_metrics
from tide_trainer.report.turn_cpu import GOAL_MS, SCHEDULER_GOAL_MS, SERVING, turn_cpu

NAME = "quickstart-cpu"


def main() -> int:
    """Runs the benchmark; returns the exit code.

    Raises:
        RuntimeError: the run failed, or recorded no turns.
    """
    arguments = _arguments()
    # Ends what runs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{NAME}-", dir=ROOT / "runs"))
    print(f"bench-{NAME}: {arguments.steps} train steps; the run's files are in {folder}", file=sys.stderr, flush=True)
    settings = (
        f'run.directory="{folder}"',
        f'run.name="{NAME}"',
        f"run.max_train_steps={arguments.steps}",
        *UNMEASURED,
        *arguments.set,
    )
    flags = [flag for one in settings for flag in ("--set", one)]
    run_command([TIDE_TRAIN, "run", CONFIG, *flags], folder / f"{NAME}.log", timeout_s=TIMEOUT_S)
    of_turn = turn_cpu(read_metrics(folder / NAME / "metrics.jsonl"))
    if of_turn is None:
        raise RuntimeError(f"{folder / NAME}: no train step recorded its turns and their CPU")
    print(of_turn.told())
    line = json.dumps(
        {
            "name": NAME,
            "value": round(of_turn.serving_ms, 3),
            "unit": f"ms of CPU a turn, {' + '.join(SERVING)}",
            "goal": GOAL_MS,
            "holds": of_turn.serving_ms <= GOAL_MS,
            "details": {
                "scheduler_ms": round(of_turn.scheduler_ms, 4),
                "scheduler_goal_ms": SCHEDULER_GOAL_MS,
                "scheduler_holds": of_turn.scheduler_ms <= SCHEDULER_GOAL_MS,
                "parts_ms": {part: round(ms, 3) for part, ms in of_turn.parts_ms.items()},
                "num_turns": of_turn.num_turns,
                "num_train_steps": arguments.steps,
                "cores": len(os.sched_getaffinity(0)),
            },
        }
    )
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="train steps of the run")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="setting of the quickstart")
    parser.add_argument("--out", type=Path, help="file that takes the last line too")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
