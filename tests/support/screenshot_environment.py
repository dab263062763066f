"""An SDK environment that shows a screenshot each turn: `tide-env serve screenshot_environment:Screenshots`."""

from __future__ import annotations

from typing import Any

from vision_chat import screenshot

from tide_sdk import Environment, Message, Start, StartInfo, Step, image


def shown(seed: int, turn: int, width: int, height: int, noisy_rows: int) -> bytes:
    """What a task shows in the observation that carries `turn`."""
    return screenshot(1000 * seed + turn, width, height, noisy_rows=noisy_rows)


class Screenshots(Environment):
    """Ends after `task.turns` turns with reward 1; `width`, `height` and `noisy_rows` say how large pictures are."""

    name = "screens"

    def start(self, task: StartInfo) -> Start:
        """The first screenshot."""
        options = task.task
        self.turns, self.turn = int(options.get("turns", 3)), 0
        self.seed = int(task.seed or 0)
        self.size = [
            int(options.get(name, least)) for name, least in (("width", 64), ("height", 48), ("noisy_rows", 0))
        ]
        return Start([self._observation()])

    def step(self, message: Message) -> Step:
        """The next one, whatever the model did."""
        self.turn += 1
        done = self.turn >= self.turns
        return Step([self._observation()], 1.0 if done else 0.0, terminated=done)

    def _observation(self) -> Message:
        width, height, noisy_rows = self.size
        data = shown(self.seed, self.turn, width, height, noisy_rows)
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"screen {self.turn}"}, image(data, "image/png")]
        return Message(role="user", content=parts)
