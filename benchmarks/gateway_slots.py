"""What the client of bench_gateway plays, and its connections: each carries the calls of one task after the other.

    Player: /start -> /observation, 20 times -> /end -> /start ...     Pauser: /start -> (/pause -> /resume)* -> /end

Callbacks and prepared bytes instead of coroutines and a client library: the client must cost far less than what it
measures.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import orjson
from gateway_plan import LoadFailed, Plan, Taken

PAUSE_GAP_S = 0.005
HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length:"


class Play:
    """A plan while it is played: what its slots share.

    Attributes:
        measuring: the window is open.
        stopping: each slot ends its task and starts no other.
        head: what each request's head holds, up to the length of its body.
        players, slots: those that play, and all of them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.taken = Taken(progress=[0] * plan.tasks)
        self.measuring = False
        self.stopping = False
        self.head = f"Host: {plan.url.removeprefix('http://')}\r\nContent-Type: application/json\r\nContent-Length: "
        self.players = [Player(self, number) for number in range(plan.tasks)]
        self.slots: list[Slot] = [*self.players, *(Pauser(self) for _ in range(plan.pausers))]
        self._num_keys = 0

    def key(self) -> str:
        """The key of the next task."""
        self._num_keys += 1
        return f"{self.plan.key}/{self._num_keys}"

    def fail(self, words: str) -> None:
        """Give the plan up."""
        for slot in self.slots:
            future = slot.ended if slot.begun.done() else slot.begun
            if not future.done():
                future.set_exception(LoadFailed(f"{self.plan.key}: {words}"))


class Slot(asyncio.Protocol, ABC):
    """One connection that carries one call at a time."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.turns = play.plan.turns
        self.task_id = ""
        self.took_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._then: Callable[[bytes], None] | None = None
        self._sent_s = 0.0
        self._pieces: list[bytes] = []
        self._missing = -1

    def begin(self) -> None:
        """Start the slot's first task."""
        task = {"turns": self.turns, "observation_chars": self.play.plan.observation_chars}
        body = {"environment": "counting", "key": self.play.key(), "task": task}
        self.call("/start", orjson.dumps(body), self.started)

    def started(self, body: bytes) -> None:
        """The answer to `/start`."""
        if self.play.measuring:
            self.play.taken.start_s.append(self.took_s)
        self.task_id = orjson.loads(body)["task_id"]
        self.renew()
        if not self.begun.done():
            self.begun.set_result(None)
        else:
            self.act()

    def renew(self) -> None:
        """Set what is counted for each task back."""

    @abstractmethod
    def act(self) -> None:
        """Do the first thing with a task that was started."""

    def end(self) -> None:
        """End the task."""
        self.call("/end", b'{"task_id":"%b"}' % self.task_id.encode(), self.over)

    def over(self, body: bytes) -> None:
        """The answer to `/end`."""
        self.turns = self.play.plan.turns
        if self.play.stopping:
            self.ended.set_result(None)
        else:
            self.begin()

    def call(self, path: str, body: bytes, then: Callable[[bytes], None]) -> None:
        """Send a call; `then` gets the body of its answer."""
        if self._transport is None:
            return
        self._then = then
        self._sent_s = time.perf_counter()
        self._transport.write(f"POST {path} HTTP/1.1\r\n{self.play.head}{len(body)}\r\n\r\n".encode() + body)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            data = b"".join((*self._pieces, data))
            self._pieces.clear()
            head, found, data = data.partition(HEAD_END)
            if not found:
                self._pieces.append(head)
                return
            lower = head.lower()
            at = lower.find(LENGTH)
            if at < 0 or not head.startswith(b"HTTP/1.1 20"):
                self.play.fail(f"{head[:200]!r} {data[:500]!r}")
                self.close()
                return
            self._missing = int(lower[at + len(LENGTH) :].partition(b"\r\n")[0])
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        self.took_s = time.perf_counter() - self._sent_s
        body = b"".join(self._pieces)
        self._pieces.clear()
        then, self._then = self._then, None
        if self._missing < 0 or then is None:
            self.play.fail("more bytes than were announced")
            return
        self._missing = -1
        then(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.ended.done():
            return
        if self.play.plan.until_cut and self.begun.done():
            self.ended.set_result(None)
        else:
            self.play.fail(f"the connection was closed ({exc})")

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


class Player(Slot):
    """A slot that plays one task after the other."""

    def __init__(self, play: Play, number: int) -> None:
        super().__init__(play)
        self.turns = number % play.plan.turns + 1
        self._number = number
        self._turn = 0
        self._before = b""
        self._turns_s = 0.0

    def renew(self) -> None:
        self._turn = 0
        self._before = b'{"task_id":"%b","turn":' % self.task_id.encode()
        if self.play.plan.until_cut:
            self.play.taken.answered[self.task_id] = 0

    def act(self) -> None:
        body = self._before + b'%d,"message":{"role":"assistant","content":"turn %d"}}' % (self._turn, self._turn)
        self.call("/observation", body, self._acted)

    def pace_s(self) -> float:
        """See `Taken.pace_s`."""
        waiting_s = time.perf_counter() - self._sent_s if self._then == self._acted else 0.0
        turns = self.play.taken.progress[self._number]
        return max(waiting_s, self._turns_s / turns if turns else 0.0) or math.inf

    def _acted(self, body: bytes) -> None:
        play, plan, taken = self.play, self.play.plan, self.play.taken
        self._turn += 1
        done = self._turn == self.turns
        if b'"turn":%d,' % self._turn not in body or (b'"terminated":true' in body) is not done:
            play.fail(f"turn {self._turn} was answered with {body[:300]!r} ... {body[-300:]!r}")
            return
        taken.all_turns += 1
        if plan.until_cut:
            taken.answered[self.task_id] = self._turn
        if play.measuring:
            taken.turns += 1
            taken.turn_s.append(self.took_s)
            taken.progress[self._number] += 1
            self._turns_s += self.took_s
        if done or play.stopping:
            self.end()
        else:
            self.act()


class Pauser(Slot):
    """A slot whose task waits for its agent, and is paused and resumed again and again."""

    def __init__(self, play: Play) -> None:
        super().__init__(play)
        self._epoch = 0

    def renew(self) -> None:
        self._epoch = 0

    def _body(self) -> bytes:
        self._epoch += 1
        return b'{"task_id":"%b","epoch":%d}' % (self.task_id.encode(), self._epoch)

    def act(self) -> None:
        if self.play.stopping:
            self.end()
        else:
            self.call("/pause", self._body(), self._paused)

    def _paused(self, body: bytes) -> None:
        if self.play.measuring:
            self.play.taken.pause_s.append(self.took_s)
        if b'"state":"paused"' not in body:
            self.play.fail(f"/pause answered {body[:300]!r}")
            return
        self.call("/resume", self._body(), self._resumed)

    def _resumed(self, body: bytes) -> None:
        if b'"state":"waiting"' not in body:
            self.play.fail(f"/resume answered {body[:300]!r}")
            return
        asyncio.get_running_loop().call_later(PAUSE_GAP_S, self.act)
