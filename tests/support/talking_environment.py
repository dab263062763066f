"""An environment with a tool, an image and hostile words, for who plays it in a terminal."""

from __future__ import annotations

import base64
import json

from tide_sdk import EndInfo, Environment, Message, Start, StartInfo, Step

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e"
PNG = b"\x89PNG\r\n\x1a\n small"
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}


class Talking(Environment):
    """Adds numbers; `stop` ends the task, `break` raises."""

    name = "talking"
    blocking = False

    def start(self, task: StartInfo) -> Start:
        self.sum = int(task.task.get("from", 0))
        url = "data:image/png;base64," + base64.b64encode(PNG).decode()
        parts = [
            {"type": "text", "text": f"seed {task.seed} {HOSTILE}"},
            {"type": "image_url", "image_url": {"url": url}},
        ]
        return Start([{"role": "user", "content": parts}], tools=[ADD])

    def step(self, message: Message) -> Step:
        if message.text == "break":
            raise ValueError(HOSTILE)
        for call in message.tool_calls or []:
            self.sum += json.loads(call["function"]["arguments"])["n"]
            return Step([{"role": "tool", "tool_call_id": call["id"], "content": f"sum {self.sum}"}], reward=0.5)
        return Step(f"heard {message.text!r}", reward=1.0, terminated=message.text == "stop")

    def end(self, reason: str | None) -> EndInfo:
        return EndInfo(metrics={"sum": self.sum, "reason": reason})
