"""The client of bench_gateway: one process that plays tasks in a closed loop, the same for every row.

bench_gateway --- Plan ---> this process: one kept-alive connection a task, the next call when an answer is there
              <-- Taken --- counts and times of the window, and what each process used of the CPU meanwhile
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import uvloop
from gateway_plan import LoadFailed, Plan, Taken
from gateway_slots import Play
from process_times import cpu_times_s, machine_busy_s

ANSWER_S = 60.0
"""Seconds within which all connections must be made, all tasks begun, and, after the window, ended."""
MAX_STRETCH = 3.0
"""A window is at most so many times as long as planned."""


class Load:
    """Plays one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._play = Play(plan)

    async def play(self, on_begun: Callable[[], None], on_measured: Callable[[], None] = lambda: None) -> Taken:
        """Connect, play, measure the window, and end every task.

        Args:
            on_begun: called once every slot has a task, if the load is played until it is cut.
            on_measured: called once the window is over.

        Raises:
            LoadFailed: see there.
        """
        slots = self._play.slots
        host, _, port = self._plan.url.removeprefix("http://").rpartition(":")
        try:
            async with asyncio.timeout(ANSWER_S):
                for slot in slots:
                    await asyncio.get_running_loop().create_connection(lambda slot=slot: slot, host, int(port))
            for slot in slots:
                slot.begin()
            await self._all("begin", [slot.begun for slot in slots])
            # Only now: servers on uvloop take one new connection between two rounds of answers, which takes long.
            for slot in slots:
                slot.act()
            if self._plan.until_cut:
                on_begun()
            else:
                await self._measure()
                self._play.stopping = True
                on_measured()
            await self._all("end", [slot.ended for slot in slots])
        finally:
            for slot in slots:
                slot.close()
        return self._play.taken

    async def _measure(self) -> None:
        plan, play, taken = self._plan, self._play, self._play.taken
        await asyncio.sleep(plan.warm_s)
        before, busy_s = cpu_times_s(plan.processes), machine_busy_s()
        client_s, began_s = time.process_time(), time.perf_counter()
        play.measuring = True
        await asyncio.sleep(plan.window_s)
        for _ in range(int(10 * (MAX_STRETCH - 1.0))):
            if taken.turns < plan.min_turns * plan.tasks:
                await asyncio.sleep(0.1 * plan.window_s)
        play.measuring = False
        taken.window_s = time.perf_counter() - began_s
        client_s = time.process_time() - client_s
        after, busy_s = cpu_times_s(plan.processes), machine_busy_s() - busy_s
        taken.cpu_s = {name: after[name] - before[name] for name in before} | {"client": client_s}
        taken.pace_s = [player.pace_s() for player in play.players]
        taken.others_cores = max(0.0, busy_s - sum(taken.cpu_s.values())) / taken.window_s

    async def _all(self, what: str, futures: list[asyncio.Future[None]]) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(*futures)
        except TimeoutError:
            raise LoadFailed(f"{self._plan.key}: not all tasks {what} within {ANSWER_S:g} s") from None


class Client:
    """The process that plays plans, one after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_play_plans, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()

    def send(self, plan: Plan) -> None:
        """Begin to play a plan; `receive` has what comes of it."""
        self._pipe.send(plan)

    def play(self, plan: Plan, cut: Callable[[], None] = lambda: None) -> Taken:
        """Play a plan.

        Args:
            plan: what is played.
            cut: of a plan that is played until it is cut: cuts it, called once every task has begun.

        Raises:
            LoadFailed: see there.
        """
        self._pipe.send(plan)
        if plan.until_cut:
            self._receive(plan)
            cut()
        found = self._receive(plan)
        assert found is not None
        return found

    def _receive(self, plan: Plan) -> Taken | None:
        if not self._pipe.poll(3 * ANSWER_S + plan.warm_s + plan.window_s):
            raise LoadFailed(f"{plan.key}: the client does not answer")
        try:
            found: Taken | str | None = self._pipe.recv()
        except EOFError:
            raise LoadFailed(f"{plan.key}: the client died") from None
        if isinstance(found, str):
            raise LoadFailed(found)
        return found


def _play_plans(pipe: Connection) -> None:
    """Play plans until the other end is closed."""
    with contextlib.suppress(EOFError, KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            plan: Plan = pipe.recv()
            try:
                found: Taken | str = runner.run(_play(plan, lambda: pipe.send(None)))
            except LoadFailed as error:
                found = str(error)
            except OSError as error:  # a TimeoutError too
                found = f"{plan.key}: {plan.url} takes no connection: {error}"
            pipe.send(found)


async def _play(plan: Plan, on_begun: Callable[[], None]) -> Taken:
    # A load is made where its loop runs.
    return await Load(plan).play(on_begun)
