"""Collects finished runs into docs/results: one JSON file and one chart of their held-out success.

    python scripts/learning_results.py NAME runs/quickstart runs/quickstart-2 ...

Writes docs/results/NAME.json and docs/results/NAME.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from tide_trainer.report.metrics import read_metrics

RESULTS = Path(__file__).parents[1] / "docs" / "results"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 360, 52, 44, 20, 150
COLOURS = ("#1f5fbf", "#c2571a", "#10806b", "#8a3ea8", "#a3262e", "#6b6b00")


def summary(folder: Path) -> dict[str, Any]:
    """One run: its settings that differ, its curve, and its invariants."""
    records = read_metrics(folder / "metrics.jsonl")
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    end = records[-1]
    warm = [r for r in records if r["event"] == "warm_start" and r["sampled_success"] is not None]
    steps = [r for r in records if r["event"] == "train_step"]
    curves = {
        kind: [[r["model_version"], r["success"]] for r in records if r["event"] == "evaluation" and r["kind"] == kind]
        for kind in ("sampled", "greedy")
    }
    reached = next((version for version, success in curves["sampled"] if success >= 0.9), None)
    return {
        "level": config["tasks"]["parameters"].get("level"),
        "seed": config["run"]["seed"],
        "eta": config["algorithm"]["eta"],
        "warm_start": {"sampled": warm[-1]["sampled_success"], "greedy": warm[-1]["greedy_success"]} if warm else None,
        **curves,
        "first_evaluation_at_090": reached,
        "train_steps": len(steps),
        "status": end["status"],
        "wall_s": round(end["wall_s"], 1),
        "prompts": end["account"],
        "largest_staleness": end["largest_staleness"],
        "parity_max_abs": end["parity_max_abs"],
        "turns": sum(step["num_turns"] for step in steps),
        "cpu_s": {part: round(seconds, 1) for part, seconds in end["cpu_s"].items()},
    }


def chart(runs: list[dict[str, Any]]) -> str:
    """Sampled success on the held-out seeds over train steps, one line per run, as SVG."""
    last = max(version for run in runs for version, _ in run["sampled"]) or 1

    def at(version: float, success: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * version / last
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * success, 1)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for share in (0, 0.25, 0.5, 0.75, 0.9, 1):
        (x, y), (right, _) = at(0, share), at(last, share)
        dash = ' stroke-dasharray="5 4"' if share == 0.9 else ""
        parts.append(f'<path d="M{x} {y}H{right}" stroke="#c9ced6" fill="none"{dash}/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for version in range(0, last + 1, max(1, last // 6)):
        x, y = at(version, 0)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{version}</text>')
    parts.append(f'<text x="{at(last / 2, 0)[0]}" y="{HEIGHT - 8}" text-anchor="middle">train step</text>')
    for index, run in enumerate(runs):
        colour, label = COLOURS[index % len(COLOURS)], f"seed {run['seed']}, eta {run['eta']}"
        points = [at(version, success) for version, success in run["sampled"]]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points)
        y = TOP + 14 + 20 * index
        parts.append(f'<path d="M{WIDTH - RIGHT + 16} {y - 4}h20" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 42}" y="{y}">{label}</text>')
    title = "Sampled success on held-out seeds over train steps"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"'
    return f'{head} font-family="sans-serif" font-size="12" fill="#333">{"".join(parts)}</svg>\n'


def main() -> int:
    """Writes both files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("runs", nargs="+", type=Path)
    arguments = parser.parse_args()
    runs = sorted((summary(run) for run in arguments.runs), key=lambda run: (run["seed"], run["eta"]))
    text = json.dumps(runs, indent=1) + "\n"
    (RESULTS / f"{arguments.name}.json").write_text(text, encoding="utf-8")
    (RESULTS / f"{arguments.name}.svg").write_text(chart(runs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
