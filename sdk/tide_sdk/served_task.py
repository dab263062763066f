"""One task of an environment server: its state, its clocks, and the record of its last turn.

    starting -> waiting <-> acting -> done      a cut (end, expiry, failure) leads from each to ending -> ended
                   |          |
                paused <- pausing

The rules are in `task_rules`; here they are carried out on one event loop. No await stands between a decision and the
change of state that belongs to it, which is what makes a turn run once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NoReturn

from tide_sdk import codec
from tide_sdk.clocks import ClockName, ClockState, TaskState, enter, first_expired, new_clocks
from tide_sdk.environment import EndInfo, StartInfo, Step
from tide_sdk.errors import TideError
from tide_sdk.instance import Instance, run_hook
from tide_sdk.task_rules import (
    TurnDecision,
    TurnView,
    check_not_over,
    clock_view,
    decide_pause,
    decide_turn,
    final_account,
)
from tide_sdk.timers import within
from tide_sdk.turn_record import TurnRecord
from tide_sdk.wire import Message, Outcome, StartRequest

_log = logging.getLogger("tide_sdk.server")
_FIRST = b'{"messages":%b,"reward":null,"terminated":false,"truncated":false,"info":{}}'
_STARTED = b'{"task_id":"%b","turn":0,"messages":%b,"tools":%b,"limits":%b,"clocks":%b}'


class ServedTask:
    """One task, used from one event loop.

    Args:
        task_id: its id.
        request: the start that it belongs to.
        instance: the environment's instance, this task's alone.
        limits: seconds of each clock.
        now: a monotonic clock in seconds.
        on_closed: called once, when the instance is released.
    """

    def __init__(
        self,
        task_id: str,
        request: StartRequest,
        instance: Instance,
        limits: Mapping[ClockName, float],
        now: Callable[[], float],
        on_closed: Callable[[ServedTask], None],
    ) -> None:
        self.task_id = task_id
        self.request = request
        self.state = TaskState.STARTING
        self.superseded = False
        self.start_failed = False
        self._instance = instance
        self._limits = limits
        self._now = now
        self._on_closed = on_closed
        self._clocks: dict[ClockName, ClockState] = enter(new_clocks(limits), TaskState.STARTING, now())
        self._turn = 0
        self._epoch = 0
        self._reward = 0.0
        self._outcome: Outcome | None = None
        self._end_info = EndInfo()
        self._record: TurnRecord | None = None
        self._latest = b""
        self._num_start_bytes = 0
        self._end_answer: bytes | None = None
        self._starting: asyncio.Task[bytes] | None = None
        self._acting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._hook: asyncio.Task[None] | None = None

    def launch(self, after: ServedTask | None = None) -> None:
        """Begin to start, once; an older attempt `after` is ended first."""
        self._starting = asyncio.create_task(self._start(after))

    async def started(self) -> bytes:
        """The answer of `/start`; every caller gets the same one.

        Raises:
            TideError: the start failed, expired or was ended.
        """
        assert self._starting is not None
        return await asyncio.shield(self._starting)

    async def _start(self, after: ServedTask | None) -> bytes:
        request = self.request
        try:
            if after is not None:
                await after.end("superseded")
            info = StartInfo(request.task or {}, request.seed, request.split, request.kind)
            messages, tools = await within(self._limits[ClockName.START], self._instance.start(info))
        except TimeoutError:
            await self._fail_start(self._expire(ClockName.START))
        except TideError as error:
            self._cut(Outcome(kind="failed", reason=error.detail), error)
            await self._fail_start(error)
        except asyncio.CancelledError:
            if self._outcome is None:
                raise
            raise TideError("ended", "the task was ended while it started") from None
        self._enter(TaskState.WAITING, new_turn=True)
        self._latest = _FIRST % messages
        limits = codec.dumps({name.value: limit_s for name, limit_s in self._limits.items()})
        clocks = codec.dumps(clock_view(self._clocks, self._now()))
        started = _STARTED % (self.task_id.encode(), messages, tools, limits, clocks)
        self._num_start_bytes = len(started)
        return started

    async def _fail_start(self, error: TideError) -> NoReturn:
        # Answered only once the place is free, so that the caller's next try finds it.
        self.start_failed = True
        assert self._closing is not None
        await asyncio.shield(self._closing)
        raise error

    @property
    def num_bytes(self) -> int:
        """Bytes of the answers that are kept for it."""
        num_turn_bytes = 0 if self._record is None else self._record.num_bytes
        return self._num_start_bytes + len(self._latest) + num_turn_bytes

    async def observe(self, turn: int, body: bytes, message: Message) -> bytes:
        """Take an action, or answer it from the record; a caller that goes away does not stop the action.

        Raises:
            TideError: 409, 410, 423, 502 or 504.
        """
        record = self._record
        last_turn = None if record is None else record.turn
        expired = None if self._outcome is None else self._outcome.clock
        view = TurnView(self.state, self._turn, last_turn, self.superseded, expired)
        if decide_turn(view, turn) is TurnDecision.ACT:
            record = self._record = TurnRecord(turn, body)
            self._enter(TaskState.ACTING, new_turn=True)
            if self._instance.inline and (self._hook is None or self._hook.done()):
                await self._act(record, message)
            else:
                self._acting = asyncio.create_task(self._act(record, message))
        elif record is not None and not record.same_as(body):
            raise TideError("turn_conflict", f"turn {turn} was already taken with another message")
        assert record is not None
        if record.error is not None and record.error.code == "turn_expired":
            check_not_over(self.state, expired)
        return await record.result()

    async def _act(self, record: TurnRecord, message: Message) -> None:
        if self._hook is not None and not self._hook.done():
            await asyncio.wait((self._hook,))  # the author's resume comes before the step
        try:
            observation, step = await self._instance.step(message)
        except TideError as error:
            if not record.settled:
                self._cut(Outcome(kind="failed", reason=error.detail), error)
            return
        if not record.settled:
            self._settle(record, observation, step)

    def _settle(self, record: TurnRecord, observation: bytes, step: Step) -> None:
        self._turn = record.turn + 1
        self._reward += step.reward or 0.0
        pausing = self.state is TaskState.PAUSING
        if step.terminated or step.truncated:
            self._outcome = Outcome(kind="completed" if step.terminated else "truncated")
            self._enter(TaskState.DONE)
            self._closing = asyncio.create_task(self._close(None))
        else:
            self._enter(TaskState.WAITING, new_turn=True)
            if pausing:
                self._enter(TaskState.PAUSED)
                self._hook = asyncio.create_task(run_hook(self._instance.pause, quiet=True))
        self._latest = observation
        record.settle(self._observation())

    def latest(self) -> bytes:
        """The answer of `GET /observation`.

        Raises:
            TideError: 410, or 409 while the task is still starting.
        """
        check_not_over(self.state, None if self._outcome is None else self._outcome.clock)
        if self.state is TaskState.STARTING:
            raise TideError("state_conflict", "the task is still starting", state=self.state.value)
        return self._observation()

    async def pause(self, epoch: int | None, *, pause: bool) -> bytes:
        """Stop the clocks (or let them go on) and tell the author's code; the clocks change whatever that says.

        Raises:
            TideError: 410, or 502 if the author's method failed.
        """
        check_not_over(self.state, None if self._outcome is None else self._outcome.clock)
        before = self.state
        decision = decide_pause(before, self._epoch, epoch, pause=pause)
        self._epoch = decision.epoch
        if decision.state is not before:
            self._enter(decision.state)
            previous, hook = self._hook, None
            if decision.state is TaskState.PAUSED:
                hook = self._instance.pause
            elif before is TaskState.PAUSED:
                hook = self._instance.resume
            if hook is not None:
                self._hook = asyncio.create_task(run_hook(hook, after=previous))
                await asyncio.shield(self._hook)
        return codec.dumps(
            {"state": self.state.value, "epoch": self._epoch, "clocks": clock_view(self._clocks, self._now())}
        )

    async def end(self, reason: str | None) -> bytes:
        """Cut the task off if it is not over, release the instance, and give the final account; safe to repeat."""
        if self.state not in (TaskState.DONE, TaskState.ENDING, TaskState.ENDED):
            self._cut(Outcome(kind="aborted", reason=reason), TideError("ended", "the task was ended"))
        assert self._closing is not None
        await asyncio.shield(self._closing)
        if self.state is not TaskState.ENDED:
            self._enter(TaskState.ENDED)
        return self._account()

    def sweep(self) -> None:
        """End the task if one of its running clocks has expired."""
        if self.state in (TaskState.WAITING, TaskState.ACTING, TaskState.PAUSING):
            clock = first_expired(self._clocks, self._now())
            if clock is not None:
                self._expire(clock)

    def _expire(self, clock: ClockName) -> TideError:
        code = "turn_expired" if clock is ClockName.TURN else "expired"
        error = TideError(code, f"the {clock.value} clock expired", clock=clock.value)
        self._cut(Outcome(kind="expired", clock=clock), error)
        return error

    def _cut(self, outcome: Outcome, error: TideError) -> None:
        # It has been logged, and is remembered: the author's frames, and with them his objects, must not be.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        self._outcome = outcome
        starting = self.state is TaskState.STARTING
        self._enter(TaskState.ENDING)
        record = self._record
        if record is not None and not record.settled:
            record.settle(error)
        for running in (self._acting, self._starting if starting else None):
            if running is not None and running is not asyncio.current_task():
                running.cancel()
        self._closing = asyncio.create_task(self._close(outcome.reason or outcome.clock or outcome.kind))

    async def _close(self, reason: str | None) -> None:
        try:
            self._end_info = await within(self._limits[ClockName.END], self._instance.end(reason))
        except TimeoutError:
            _log.warning("task %s: the environment did not end within its limit and is abandoned", self.task_id)
            self._end_info = EndInfo(metrics={"end_expired": True})
        except TideError as error:
            self._outcome = Outcome(kind="failed", reason=error.detail)
        finally:
            if self.state is TaskState.ENDING:
                self._enter(TaskState.ENDED)
            self._on_closed(self)

    def _account(self) -> bytes:
        if self._end_answer is None:
            assert self._outcome is not None
            clocks = clock_view(self._clocks, self._now())
            account = final_account(self._outcome, self._reward, self._end_info, self._turn)
            self._end_answer = codec.compact(codec.dumps(account | {"clocks": clocks}))
        return self._end_answer

    def _observation(self) -> bytes:
        head = b'{"turn":%d,"clocks":%b,' % (self._turn, codec.dumps(clock_view(self._clocks, self._now())))
        return head + self._latest[1:]

    def _enter(self, state: TaskState, *, new_turn: bool = False) -> None:
        self._clocks = enter(self._clocks, state, self._now(), new_turn=new_turn)
        self.state = state
