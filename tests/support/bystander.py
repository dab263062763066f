"""Another owner's agent in a process of its own: one turn after the other, until it is stopped or a call is refused.

    python bystander.py URL TOKEN ENVIRONMENT FILE

FILE has the number of its turns, in 12 digits.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tide_sdk.http import LeanClient

GO = {"role": "assistant", "content": "go"}
LIMIT_S = 60.0


@dataclass
class Bystander:
    """The process, and how far it is."""

    process: subprocess.Popen[bytes]
    file: Path

    @classmethod
    def start(cls, url: str, token: str, environment: str, file: Path) -> Bystander:
        """Start it, and wait for its first turns."""
        argv = [sys.executable, __file__, url, token, environment, str(file)]
        found = cls(subprocess.Popen(argv, stdin=subprocess.DEVNULL), file)
        found.wait_for(3)
        return found

    @property
    def turns(self) -> int:
        """Turns that it has played."""
        assert self.process.poll() is None, "the bystander was refused; its last words are above"
        return int(self.file.read_bytes() or b"0") if self.file.exists() else 0

    def wait_for(self, num: int) -> None:
        """Wait until it has played so many more turns."""
        target, deadline_s = self.turns + num, time.monotonic() + LIMIT_S
        while self.turns < target:
            assert time.monotonic() < deadline_s, f"the bystander stands still at {self.turns}"
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


async def play(url: str, token: str, environment: str, file: str) -> None:
    """For ever; any answer but a success ends it."""
    number = os.open(file, os.O_CREAT | os.O_WRONLY, 0o600)
    async with LeanClient(url, headers={"Authorization": f"Bearer {token}"}, timeout_s=LIMIT_S) as client:
        task = await client.json("POST", "/start", {"environment": environment, "key": f"bystander-{os.getpid()}"})
        turn = 0
        while True:
            await client.json("POST", "/observation", {"task_id": task["task_id"], "turn": turn, "message": GO})
            turn += 1
            os.pwrite(number, b"%012d" % turn, 0)


if __name__ == "__main__":
    asyncio.run(play(*sys.argv[1:]))
