"""SDK environments that are awkward to host, each for one kind of fault; hosted by `awkward_table`.

Counting how often each acted is theirs, so that a test sees what really happened and not what a gateway says.
"""

from __future__ import annotations

import base64
import os
import random
import threading
import time
from typing import ClassVar

from tide_sdk import EndInfo, Environment, Message, Start, StartInfo, Step

GATHER_S = 30.0
PICTURE_BYTES = 5_000_000


class _Counting(Environment):
    """Ends after `task.turns` turns (0 never) with reward 1; `info.effects` says how often it acted."""

    def start(self, task: StartInfo) -> Start:
        self.num_turns = int(task.task.get("turns", 0))
        self.effects = 0
        return Start("go")

    def step(self, message: Message) -> Step:
        self.effects += 1
        over = self.effects == self.num_turns
        return Step("ok", float(over), terminated=over, info={"effects": self.effects})


class Logged(_Counting):
    """Writes + when its start begins and - when its end is over, one letter at a time, into one file of all servers.

    Args:
        file: the file.
        slow_s: seconds that each start and each end takes.
    """

    def __init__(self, file: str, slow_s: float) -> None:
        self.slow_s = slow_s
        self.fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def start(self, task: StartInfo) -> Start:
        os.write(self.fd, b"+")
        time.sleep(self.slow_s)
        return super().start(task)

    def end(self, reason: str | None) -> None:
        time.sleep(self.slow_s)
        os.write(self.fd, b"-")
        os.close(self.fd)


class Gathering(_Counting):
    """Blocks in each method until as many tasks of this server are in the same one: all at once, or a failure.

    Args:
        size: how many tasks there are.
        slow_s: seconds for which a step blocks further, by itself.
    """

    barriers: ClassVar[dict[str, threading.Barrier]] = {}
    lock = threading.Lock()

    def __init__(self, size: int, slow_s: float = 0.0) -> None:
        self.size, self.slow_s = size, slow_s

    def start(self, task: StartInfo) -> Start:
        self._gather("start")
        return super().start(task)

    def step(self, message: Message) -> Step:
        self._gather("step")
        time.sleep(self.slow_s)
        return super().step(message)

    def pause(self) -> None:
        self._gather("pause")

    def end(self, reason: str | None) -> None:
        self._gather("end")

    def _gather(self, what: str) -> None:
        with self.lock:
            barrier = self.barriers.setdefault(what, threading.Barrier(self.size))
        barrier.wait(GATHER_S)


class Browser(Gathering):
    """As a browser's driver: fails unless all its calls come from the thread that made it. Shows a large picture.

    `end` tells the thread's name, and the picture of each turn follows from the turn alone.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.thread = threading.get_ident()

    def step(self, message: Message) -> Step:
        done = super().step(message)
        words = {"type": "text", "text": "the page"}
        image = {"type": "image_url", "image_url": {"url": picture_url(self.effects)}}
        return Step([{"role": "user", "content": [words, image]}], done.reward, done.terminated, info=done.info)

    def resume(self) -> None:
        self._check()

    def end(self, reason: str | None) -> EndInfo:  # type: ignore[override]
        super().end(reason)
        return EndInfo(metrics={"thread": str(self.thread)})

    def _gather(self, what: str) -> None:
        self._check()
        super()._gather(what)

    def _check(self) -> None:
        if threading.get_ident() != self.thread:
            raise RuntimeError("called from another thread than the one that started the browser")


def picture_url(number: int) -> str:
    """A picture of `PICTURE_BYTES` bytes that do not compress, as a data URL."""
    content = random.Random(number).randbytes(PICTURE_BYTES)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
