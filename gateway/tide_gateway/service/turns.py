"""`/observation`: exactly-once turns.

    action -> [commit: intent, acting] -> environment server -> [commit: result, waiting or done] -> answer

A repeated action joins the running one, here or on the replica that sends it, or is answered from the store. The
action goes on when its caller goes away. What a dead replica left is sent again by another one, to the same
incarnation, whose server answers from its record.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tide_gateway import deadlines, lifecycle, upstream
from tide_gateway.lifecycle import Task, TurnVerdict
from tide_gateway.rows import Event, Intent, Result
from tide_gateway.service import answers, pictures
from tide_gateway.service.endings import Endings
from tide_gateway.service.following import until_answered
from tide_gateway.service.live import Live, Registry, Running, unfinished
from tide_gateway.service.pauses import Pauses
from tide_sdk import codec
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError
from tide_sdk.images import DATA_MARK

MAX_TELLS = 3
_SLACK_S = 1.0
"""Added to the deadline of an upstream call: the sweep ends the task first, with the clock's name."""


class Turns:
    """Takes turns.

    Args:
        registry: the open tasks.
        endings: ends tasks whose environment breaks, and reaches environment servers.
        pauses: brings the server's pause in line before an action goes out.
    """

    def __init__(self, registry: Registry, endings: Endings, pauses: Pauses) -> None:
        self._registry = registry
        self._endings = endings
        self._pauses = pauses

    async def observe(self, owner: str, task_id: str, turn: int, message: dict[str, Any]) -> bytes:
        """Answer `POST /observation`: act once, whatever is repeated.

        Raises:
            TideError: the turn cannot be taken, or the task ended while the environment acted.
        """
        registry = self._registry
        live = registry.lives.get(task_id)
        if live is None or live.task.owner != owner or not _is_next(live.task, turn):
            # Whatever an old row says but "go on" may be wrong; that is proved wrong by the commit.
            live = await registry.find(owner, task_id)

        async def take() -> bytes | Running:
            if not self._endings.hosts(live.task):
                await self._endings.refuse_elsewhere(live.task)
            if deadlines.overdue(live.task, registry.time.now_s()) is not None:
                await self._endings.expire_if_overdue(live)
            verdict = lifecycle.take_turn(live.task, turn)
            if verdict is TurnVerdict.STORED:
                stored = await self._stored(live, turn, message)
                return answers.with_clocks(stored, live.task, registry.time.now_s())
            if verdict is TurnVerdict.RUN:
                now_s = registry.time.now_s()
                intent = Intent(turn, codec.dumps(message), now_s)
                await registry.commit(live, lifecycle.acting(live.task, now_s, registry.me), intent=intent)
                return self._send(live, turn, message, intent.action)
            if live.running is None or live.running.turn != turn:
                await self._check_same(live, turn, message)
                return self._join(live, turn, message)
            if not codec.same(live.running.message, message):
                raise _turn_conflict(turn)
            return live.running

        try:
            taken = await registry.decide(live, take)
        except TideError as error:
            raise await self._unless_replaced(live.task, error) from error
        return await asyncio.shield(taken.answer) if isinstance(taken, Running) else taken

    async def latest(self, owner: str, task_id: str) -> bytes:
        """Answer `GET /observation`: the latest observation again; changes and extends nothing."""
        live = await self._registry.find(owner, task_id)
        task = live.task
        now_s = self._registry.time.now_s()
        over = task.state in (TaskState.ENDING, TaskState.ENDED)
        if over:
            raise lifecycle.refusal(task)
        if deadlines.overdue(task, now_s) is not None:
            await self._registry.decide(live, lambda: self._endings.expire_if_overdue(live))
            if not lifecycle.is_open(live.task) and live.task.state is not TaskState.DONE:
                raise lifecycle.refusal(live.task)
        if task.turn > 0:
            stored = await self._registry.repository.turn_of(task_id, task.turn - 1)
            if stored is not None and stored.answer is not None:
                return answers.with_clocks(stored.answer, live.task, now_s)
        start = await self._registry.repository.start_of(task_id)
        if start is None or start.answer is None:
            raise TideError("state_conflict", "the task is still starting", state=task.state.value)
        first = {"turn": 0, "messages": codec.loads(start.answer)["messages"], "reward": None}
        body = first | {"terminated": False, "truncated": False, "info": {}}
        return answers.with_clocks(codec.dumps(body), live.task, now_s)

    async def take_over(self, live: Live) -> None:
        """Send again what a dead replica has sent, or was about to send; the caller holds the lock and has committed
        the task as this replica's."""
        stored = await self._registry.repository.turn_of(live.task.task_id, live.task.turn)
        if stored is None:
            await self._endings.fail(live, "environment_failed", f"turn {live.task.turn} has no stored action")
            return
        running = live.running
        if running is None or running.turn != live.task.turn:
            self._send(live, live.task.turn, codec.loads(stored.action), stored.action)
            return
        # Calls wait here already; they get the answer.
        if running.worker is not None:
            running.worker.cancel()
        self._begin(live, running, sends=True)

    async def _unless_replaced(self, task: Task, error: TideError) -> TideError:
        """The refusal of a new turn: however an attempt was over, what counts is that a higher one has begun."""
        if error.code not in ("ended", "expired", "state_conflict"):
            return error
        newest = await self._registry.repository.newest_attempt(task.owner, task.key)
        replaced = newest is not None and newest.attempt > task.attempt
        return lifecycle.stale(task) if replaced else error

    async def _stored(self, live: Live, turn: int, message: dict[str, Any]) -> bytes:
        stored = await self._check_same(live, turn, message)
        if stored is None:
            raise TideError("turn_order", f"turn {turn} has no stored answer")
        return stored

    async def _check_same(self, live: Live, turn: int, message: dict[str, Any]) -> bytes | None:
        """The stored answer of a turn, after a look that the action is the same."""
        stored = await self._registry.repository.turn_of(live.task.task_id, turn)
        if stored is None or not codec.same(codec.loads(stored.action), message):
            raise _turn_conflict(turn)
        return stored.answer

    def _join(self, live: Live, turn: int, message: dict[str, Any]) -> Running:
        """Wait for a turn whose intent is stored, but for which nothing is in flight here.

        It may be another replica's. Or it is ours, and its result could not be written: the server answers a turn
        that it has already acted from its record.
        """
        action = codec.dumps(message)
        if live.task.worker == self._registry.me:
            return self._send(live, turn, message, action)
        running = Running(turn, message, action, asyncio.get_running_loop().create_future())
        self._begin(live, running, sends=False)
        return running

    def _send(self, live: Live, turn: int, message: dict[str, Any], action: bytes) -> Running:
        running = Running(turn, message, action, asyncio.get_running_loop().create_future())
        self._begin(live, running, sends=True)
        return running

    def _begin(self, live: Live, running: Running, *, sends: bool) -> None:
        running.sends = sends
        live.running = running
        work = self._act(live, running) if sends else until_answered(self._registry, live, running)
        running.worker = self._registry.spawn(work, f"tide-act-{live.task.task_id}")

    async def _act(self, live: Live, running: Running) -> None:
        """Send the action, store the result, answer all who wait, in every case."""
        try:
            await self._play(live, running)
        except BaseException:
            # A stop, most often while the result was being written; whoever asks again finds the turn as stored.
            # Without a worker it is an end that could not be written either.
            if live.running is running and running.worker in (None, asyncio.current_task()):
                live.running = None
                running.fail(unfinished())
            raise

    async def _play(self, live: Live, running: Running) -> None:
        registry = self._registry
        try:
            answer, raw = await self._ask_in_time(live, running)
        except TimeoutError:
            await self._broken(live, running, "environment_failed", "the environment did not answer in time")
            return
        except upstream.EnvironmentLost as error:
            await self._broken(live, running, "environment_lost", str(error))
            return
        except upstream.EnvironmentFailed as error:
            await self._broken(live, running, "environment_failed", error.detail)
            return
        raw.pop("clocks", None)
        stored, images = codec.dumps(raw), ()
        if DATA_MARK in stored:
            stored, images = await asyncio.to_thread(pictures.taken_out, stored)

        async def store() -> Task | None:
            now_s = registry.time.now_s()
            if deadlines.overdue(live.task, now_s) is not None:
                await self._endings.expire_if_overdue(live)
            if live.running is not running or not self._is_ours(live.task, running):
                return None
            now_s = registry.time.now_s()
            after = lifecycle.answered(live.task, now_s, terminated=answer.terminated, truncated=answer.truncated)
            events = (Event(after.state.value, now_s),) if after.state is not TaskState.WAITING else ()
            result = Result(running.turn, stored, now_s)
            await registry.commit(live, after, result=result, events=events, images=images)
            live.running = None
            if after.state is TaskState.DONE:
                self._endings.release(live)
            return after

        try:
            after = await registry.decide(live, store)
        except TideError as error:
            if live.running is running:
                live.running = None
            running.worker = None  # this very task
            running.fail(error)
            return
        if after is None:
            await until_answered(self._registry, live, running)
            return
        if not running.answer.done():
            running.answer.set_result(answers.with_clocks(stored, live.task, registry.time.now_s()))
        if after.state is TaskState.PAUSED:
            await self._pauses.settle(live)

    async def _ask_in_time(self, live: Live, running: Running) -> tuple[upstream.Observed, dict[str, Any]]:
        """The environment's answer, asked for again where an outage that no clock counts gave it more time."""
        while True:
            try:
                return await self._ask(live, running)
            except TimeoutError:
                await self._endings.expire(live.task.task_id)
                left_s = deadlines.remaining_s(live.task, self._registry.time.now_s())
                if live.running is not running or not self._is_ours(live.task, running) or left_s <= 0:
                    raise

    async def _ask(self, live: Live, running: Running) -> tuple[upstream.Observed, dict[str, Any]]:
        """The environment's answer; a server that still thinks that the task is paused is told again."""
        for _ in range(MAX_TELLS):
            limit_s = deadlines.remaining_s(live.task, self._registry.time.now_s()) + _SLACK_S
            server = self._endings.at_hand(live.task)
            if server is None or self._pauses.may_hold_one(live):
                async with asyncio.timeout(limit_s):
                    server = await self._endings.reach(live.task)
                    await self._pauses.before_action(live)
                limit_s = deadlines.remaining_s(live.task, self._registry.time.now_s()) + _SLACK_S
            try:
                return await upstream.observe(server, live.task.peer_task, running.turn, running.action, limit_s)
            except upstream.EnvironmentFailed as error:
                if error.code != "paused":
                    raise
                live.told = (-1, True)
        raise upstream.EnvironmentFailed(423, "paused", "the environment does not resume")

    async def _broken(self, live: Live, running: Running, code: str, detail: str) -> None:
        async def fail() -> bool:
            if live.running is not running:
                return True
            if not self._is_ours(live.task, running):
                return False
            running.worker = None  # this very task: it must not be cancelled by the ending
            await self._endings.fail(live, code, detail)
            return True

        if not await self._registry.decide(live, fail):
            await until_answered(self._registry, live, running)

    def _is_ours(self, task: Task, running: Running) -> bool:
        return lifecycle.is_busy(task) and task.turn == running.turn and task.worker == self._registry.me


def _is_next(task: Task, turn: int) -> bool:
    """True if the row, as last read, waits for this turn."""
    return task.state is TaskState.WAITING and task.turn == turn


def _turn_conflict(turn: int) -> TideError:
    return TideError("turn_conflict", f"turn {turn} was already taken with another message", turn=turn)
