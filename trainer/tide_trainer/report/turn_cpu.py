"""What a turn costs in CPU, part by part: CPU of the train steps over the turns that were played meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tide_trainer.report.formats import number, numbers_of

SERVING = ("scheduler", "router", "gateway")
"""The parts that serve a turn, as against those that play it, sample it and learn from it."""
GOAL_MS = 2.0
"""CPU that a turn may take in `SERVING` together."""
SCHEDULER_GOAL_MS = 0.1
"""CPU that a turn may take in the scheduler."""


@dataclass(frozen=True, slots=True)
class TurnCpu:
    """The CPU of a turn.

    Attributes:
        num_turns: turns that it is a mean of.
        parts_ms: milliseconds of CPU a turn by part, the largest first; `main` is without the scheduler.
    """

    num_turns: int
    parts_ms: Mapping[str, float]

    @property
    def serving_ms(self) -> float:
        """Of the parts of `SERVING` together."""
        return sum(self.parts_ms.get(part, 0.0) for part in SERVING)

    @property
    def scheduler_ms(self) -> float:
        """Of the pure scheduler: its events, its plans, and what the engines' measurements cost it."""
        return self.parts_ms.get("scheduler", 0.0)

    def told(self) -> str:
        """In one line, with the goal."""
        served = " + ".join(f"{part} {self.parts_ms.get(part, 0.0):.2f}" for part in SERVING)
        others = ", ".join(f"{part} {ms:.2f}" for part, ms in self.parts_ms.items() if part not in SERVING)
        line = f"CPU of a turn: {served} = {self.serving_ms:.2f} ms (goal: at most {GOAL_MS:g})"
        return f"{line}; {others} ms" if others else line


def turn_cpu(records: Iterable[Mapping[str, Any]]) -> TurnCpu | None:
    """The CPU of a turn over a run's `train_step` records; None where no turn was recorded with its CPU.

    Args:
        records: fields may be missing or of a wrong type; such a train step counts neither turns nor CPU.
    """
    num_turns, cpu_s = 0.0, dict[str, float]()
    for record in records:
        turns, parts = number(record, "num_turns"), numbers_of(record, "cpu_s")
        if not turns or turns < 0 or not parts:
            continue
        num_turns += turns
        scheduler_s = number(record, "scheduler_cpu_s")
        if scheduler_s is not None and "main" in parts:
            # The scheduler is measured inside the main process.
            parts = {**parts, "scheduler": scheduler_s, "main": max(0.0, parts["main"] - scheduler_s)}
        for part, amount_s in parts.items():
            cpu_s[part] = cpu_s.get(part, 0.0) + amount_s
    if not num_turns:
        return None
    ordered = sorted(cpu_s, key=lambda part: (-cpu_s[part], part))
    return TurnCpu(int(num_turns), {part: 1000 * cpu_s[part] / num_turns for part in ordered})
