"""An agent's play in a task of its own, so that whatever it does to that task, or swallows, stays there.

    begin -> [own task: context, agent, then its clean-ups]
    until_over: the agent has returned, was stopped, or is abandoned; the task may be ended beside the clean-ups
    until_closed: the clean-ups are done

A cancellation of the waiting caller stops the agent and is kept in `cancelled`; the caller raises it in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from tide_sdk.agents import Agent, AgentResult
from tide_sdk.context import AgentContext
from tide_sdk.errors import told
from tide_sdk.outcomes import DeadlinePassed

_log = logging.getLogger("tide_sdk.playing")
STOP_LIMIT_S = 30.0
"""Seconds in which an agent must stop once it is cancelled; then it is abandoned."""
_ASKED_EVERY_S = 1.0
"""Seconds after which an agent that goes on is cancelled again."""
_ABANDONED = "the agent goes on although it was cancelled; it is abandoned"


class Playing:
    """One play of an agent.

    Args:
        agent: who plays.
        task_id: the task's id, for the log.
        make_context: makes the context, in the agent's task.
        deadline_s: wall seconds for the agent.

    Attributes:
        ctx: the agent's context, None where it could not be made.
        result: what the agent returned.
        failure: what it raised, or what stopped it.
        cancelled: the caller's own cancellation.
        notes: clean-ups that were not done.
    """

    def __init__(
        self, agent: Agent, task_id: str, make_context: Callable[[], Awaitable[AgentContext]], deadline_s: float
    ) -> None:
        self.ctx: AgentContext | None = None
        self.result = AgentResult()
        self.failure: BaseException | None = None
        self.cancelled: asyncio.CancelledError | None = None
        self.notes: list[str] = []
        self._agent, self._task_id, self._make_context = agent, task_id, make_context
        self._deadline_s = deadline_s
        self._stopped: BaseException | None = None
        self._abandoned = False

    def begin(self) -> None:
        """Let the agent play from now on."""
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self._coroutine = self._run()
        self._task = loop.create_task(self._coroutine)
        self._end_s = loop.time() + self._deadline_s

    async def until_over(self) -> None:
        """Wait until the agent is over; one that does not stop when it must is abandoned. Raises nothing."""
        loop = asyncio.get_running_loop()
        give_up_s = float("inf")
        while not self._over.done():
            ask_s = self._end_s if self._stopped is None else loop.time() + _ASKED_EVERY_S
            try:
                await asyncio.wait((self._over,), timeout=max(0.0, min(ask_s, give_up_s) - loop.time()))
            except asyncio.CancelledError as error:
                self.cancelled, ask_s = error, loop.time()
                if self._over.done():
                    self._task.cancel()  # a clean-up runs already
            if self._over.done() or loop.time() < min(ask_s, give_up_s):
                continue
            if loop.time() >= give_up_s:
                self._abandon()
                return
            if self._stopped is None:
                give_up_s = loop.time() + STOP_LIMIT_S
            self._stopped = self.cancelled or DeadlinePassed(f"the task took longer than {self._deadline_s} s")
            self._task.cancel()

    async def until_closed(self) -> None:
        """Wait for the clean-ups; a cancellation skips the one that runs. Raises nothing."""
        loop = asyncio.get_running_loop()
        limit_s = STOP_LIMIT_S + (self.ctx.cleanups.limit_s if self.ctx is not None else 0.0)
        give_up_s = loop.time() + limit_s
        while not self._abandoned and not self._task.done():
            try:
                await asyncio.wait((self._task,), timeout=max(0.0, give_up_s - loop.time()))
            except asyncio.CancelledError as error:
                self.cancelled = error
                self._task.cancel()
            if not self._task.done() and loop.time() >= give_up_s:
                self._abandon()
        if self.ctx is not None:
            self.notes[:0] = self.ctx.cleanups.failures

    async def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self.ctx = await self._make_context()
            await self.ctx.images.offer(self.ctx.messages)
            self.result = await self._agent(self.ctx)
        except Exception as error:  # noqa: BLE001 (the boundary: it becomes the outcome)
            failure = error
        except BaseException as error:
            if self._abandoned or isinstance(error, KeyboardInterrupt):
                raise
            # SystemExit would end the whole process, and with it everyone's tasks; a CancelledError that nobody asked
            # for would end this task without a word.
            failure = RuntimeError(f"the agent raised {told(error)}")
            failure.__cause__ = error
        finally:
            if self.ctx is not None:
                self.ctx.leave()
            if not self._abandoned:
                await _forget_cancellations()
                # What stopped it counts, whatever it made of being cancelled.
                self.failure = self._stopped or failure
                self._over.set_result(None)
        if self.ctx is not None:
            with contextlib.suppress(asyncio.CancelledError):  # the caller knows
                await self.ctx.cleanups.run(self.failure)

    def _abandon(self) -> None:
        """Close what cannot be cancelled, so that it does not keep the process; its clean-ups are not run."""
        self._abandoned = True
        self.failure = self.failure or self._stopped
        self.notes.append(_ABANDONED)
        _log.error("%s (task %s): %s", self._agent.name, self._task_id, _ABANDONED)
        self._task.add_done_callback(_looked_at)
        if self.ctx is not None:
            self.ctx.leave()
        with contextlib.suppress(RuntimeError):  # it goes on even so
            self._coroutine.close()
        self._task.cancel()  # wakes it, so that it finds its coroutine closed


async def _forget_cancellations() -> None:
    """What an agent did to its own task must not reach the clean-ups."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
    with contextlib.suppress(asyncio.CancelledError):  # one that was still on its way
        await asyncio.sleep(0)
    while task is not None and task.cancelling():
        task.uncancel()


def _looked_at(task: asyncio.Task[None]) -> None:
    """An abandoned task's failure is told already."""
    if not task.cancelled():
        task.exception()
