"""Fakes of the loop, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tide_trainer.types import Segment, Trajectory


def trajectory(
    group: str = "train/0",
    member: int = 0,
    reward: float | None = 1.0,
    version: int | None = None,
    outcome: str = "completed",
) -> Trajectory:
    """A trajectory of one turn: prompt 5 6, sampled 7 8 by `version`; None: an evaluation's own, else 0."""
    if version is None:
        version = int(group.split("/")[1]) if group.startswith("eval/") else 0
    segment = Segment((5, 6, 7, 8), (False, False, True, True), (0.0, 0.0, -0.5, -0.25), (-1, -1, version, version))
    return Trajectory(f"{group}/{member}", group, member, (segment,), reward, outcome, 1, version)


class ScriptedRunner:
    """Runs tasks as the test says: `script(prompt, group, member, attempt)` gives the trajectory or an awaitable."""

    def __init__(self, script: Callable[..., object]) -> None:
        self.script = script
        self.started: list[tuple[str, int, int]] = []
        self.cancelled = 0
        self.temperatures: list[float | None] = []
        self.order_keys: list[int] = []

    async def run(self, prompt, group, member, attempt, kind, temperature=None, version=None, order_key=0):
        self.started.append((group, member, attempt))
        self.temperatures.append(temperature)
        self.order_keys.append(order_key)
        try:
            await asyncio.sleep(0)
            result = self.script(prompt, group, member, attempt)
            return await result if asyncio.iscoroutine(result) or asyncio.isfuture(result) else result
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
