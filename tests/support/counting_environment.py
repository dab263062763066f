"""An SDK environment that counts its own actions: `tide-env serve counting_environment:Counting`."""

from __future__ import annotations

from typing import Any

from tide_sdk import Environment, Start, Step


class Counting(Environment):
    """Ends after `task.turns` turns with reward 1; `info.effects` says how often it acted."""

    name = "counting"
    blocking = False

    def start(self, task: Any) -> Start:
        self.turns = int(task.task.get("turns", 1))
        self.effects = 0
        return Start("go")

    def step(self, message: Any) -> Step:
        self.effects += 1
        done = self.effects >= self.turns
        return Step("over" if done else "go", 1.0 if done else 0.0, terminated=done, info={"effects": self.effects})
