"""The same environment as `fastapi_environment`, on the SDK: `tide-env serve sdk_environment:Counting`."""

from __future__ import annotations

from typing import Any

from tide_sdk import Environment, Start, Step


class Counting(Environment):
    """Ends after `task.turns` turns with reward 1; each observation has `task.observation_chars` characters."""

    name = "counting"
    blocking = False
    capacity = 1024

    def start(self, task: Any) -> Start:
        self.turns = int(task.task.get("turns", 20))
        self.observation = "o" * int(task.task.get("observation_chars", 200))
        self.effects = 0
        return Start(self.observation)

    def step(self, message: Any) -> Step:
        self.effects += 1
        done = self.effects >= self.turns
        return Step(self.observation, 1.0 if done else 0.0, terminated=done, info={"effects": self.effects})
