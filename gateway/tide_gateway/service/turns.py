"""`/observation`: exactly-once turns.

    action -> [commit: intent, acting] -> environment server -> [commit: result, waiting or done] -> answer

A repeated action joins the running one or is answered from the store. The action goes on when its caller goes away.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tide_gateway import lifecycle, upstream
from tide_gateway.lifecycle import TurnVerdict
from tide_gateway.rows import Event, Intent, Result
from tide_gateway.service import answers
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Live, Registry, Running, unfinished
from tide_gateway.service.pauses import Pauses
from tide_sdk import codec
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import ObservationResponse

MAX_TELLS = 3
_SLACK_S = 1.0
"""Added to the deadline of an upstream call: the sweep ends the task first, with the clock's name."""


class Turns:
    """Takes turns.

    Args:
        registry: the open tasks.
        endings: ends tasks whose environment breaks.
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
        live = await registry.find(owner, task_id)
        async with live.lock:
            await self._endings.expire_if_overdue(live)
            verdict = lifecycle.take_turn(live.task, turn)
            if verdict is TurnVerdict.STORED:
                stored = await self._stored(live, turn, message)
                return answers.with_clocks(stored, live.task, registry.time.now_s())
            running = live.running
            if verdict is TurnVerdict.RUN:
                now_s = registry.time.now_s()
                intent = Intent(turn, codec.dumps(message), now_s)
                await registry.commit(live, lifecycle.acting(live.task, now_s), intent=intent)
                running = self._send(live, turn, message)
            elif running is None:
                # The intent is stored, but nothing is in flight: the result could not be written. The server
                # answers a turn that it has already acted from its record.
                await self._check_same(live, turn, message)
                running = self._send(live, turn, message)
            elif not answers.same_json(running.message, message):
                raise _turn_conflict(turn)
        return await asyncio.shield(running.answer)

    async def latest(self, owner: str, task_id: str) -> bytes:
        """Answer `GET /observation`: the latest observation again; changes and extends nothing."""
        live = await self._registry.find(owner, task_id)
        task = live.task
        now_s = self._registry.time.now_s()
        over = task.state in (TaskState.ENDING, TaskState.ENDED)
        if over:
            raise lifecycle.refusal(task)
        if lifecycle.overdue(task, now_s) is not None:
            async with live.lock:
                await self._endings.expire_if_overdue(live)
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

    async def _stored(self, live: Live, turn: int, message: dict[str, Any]) -> bytes:
        stored = await self._check_same(live, turn, message)
        if stored is None:
            raise TideError("turn_order", f"turn {turn} has no stored answer")
        return stored

    async def _check_same(self, live: Live, turn: int, message: dict[str, Any]) -> bytes | None:
        """The stored answer of a turn, after a look that the action is the same."""
        stored = await self._registry.repository.turn_of(live.task.task_id, turn)
        if stored is None or not answers.same_json(codec.loads(stored.action), message):
            raise _turn_conflict(turn)
        return stored.answer

    def _send(self, live: Live, turn: int, message: dict[str, Any]) -> Running:
        running = Running(turn, message, asyncio.get_running_loop().create_future())
        live.running = running
        running.worker = self._registry.spawn(self._act(live, running), f"tide-act-{live.task.task_id}")
        return running

    async def _act(self, live: Live, running: Running) -> None:
        """Send the action, store the result, answer all who wait, in every case."""
        try:
            await self._play(live, running)
        except BaseException:
            # A stop, most often while the result was being written; whoever asks again finds the turn as stored.
            if live.running is running:
                live.running = None
            running.fail(unfinished())
            raise

    async def _play(self, live: Live, running: Running) -> None:
        registry = self._registry
        try:
            answer, raw = await self._ask(live, running)
        except TimeoutError:
            await self._endings.expire(live.task.task_id)
            # Not overdue, then, as the stored clock tells it (it may have been set back), and yet no answer came.
            await self._broken(live, running, "environment_failed", "the environment did not answer in time")
            return
        except upstream.EnvironmentLost as error:
            await self._broken(live, running, "environment_lost", str(error))
            return
        except upstream.EnvironmentFailed as error:
            await self._broken(live, running, "environment_failed", error.detail)
            return
        raw.pop("clocks", None)
        stored = codec.dumps(raw)
        async with live.lock:
            if live.running is not running:
                return
            now_s = registry.time.now_s()
            await self._endings.expire_if_overdue(live)
            if live.running is not running:
                return
            after = lifecycle.answered(live.task, now_s, terminated=answer.terminated, truncated=answer.truncated)
            events = (Event(after.state.value, now_s),) if after.state is not TaskState.WAITING else ()
            live.running = None
            try:
                await registry.commit(live, after, result=Result(running.turn, stored, now_s), events=events)
            except TideError as error:
                running.fail(error)
                return
            if after.state is TaskState.DONE:
                self._endings.release(live)
        if not running.answer.done():
            running.answer.set_result(answers.with_clocks(stored, live.task, now_s))
        if after.state is TaskState.PAUSED:
            await self._pauses.settle(live)

    async def _ask(self, live: Live, running: Running) -> tuple[ObservationResponse, dict[str, Any]]:
        """The environment's answer; a server that still thinks that the task is paused is told again."""
        for _ in range(MAX_TELLS):
            server = live.server
            if server is None:
                raise upstream.EnvironmentLost("the environment server is gone")
            if live.peer_paused:
                await self._pauses.settle(live)
            limit_s = lifecycle.remaining_s(live.task, self._registry.time.now_s()) + _SLACK_S
            try:
                return await upstream.observe(server, live.task.peer_task, running.turn, running.message, limit_s)
            except upstream.EnvironmentFailed as error:
                if error.code != "paused":
                    raise
                live.peer_paused = True
        raise upstream.EnvironmentFailed(423, "paused", "the environment does not resume")

    async def _broken(self, live: Live, running: Running, code: str, detail: str) -> None:
        async with live.lock:
            if live.running is running:
                running.worker = None  # this very task: it must not be cancelled by the ending
                await self._endings.fail(live, code, detail)


def _turn_conflict(turn: int) -> TideError:
    return TideError("turn_conflict", f"turn {turn} was already taken with another message", turn=turn)
