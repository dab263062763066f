"""`/pause` and `/resume`: our clocks stop with the commit; the environment server is told afterwards, in order."""

from __future__ import annotations

import logging

from tide_gateway import lifecycle, upstream
from tide_gateway.rows import Event
from tide_gateway.service import answers
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Live, Registry
from tide_sdk.clocks import TaskState
from tide_sdk.wire import EpochRequest

log = logging.getLogger(__name__)

TELL_TIMEOUT_S = 10.0


class Pauses:
    """Pauses and resumes tasks.

    Args:
        registry: the open tasks.
        endings: ends a task whose clock had run out before the pause.
    """

    def __init__(self, registry: Registry, endings: Endings) -> None:
        self._registry = registry
        self._endings = endings

    async def change(self, owner: str, request: EpochRequest, *, paused: bool) -> bytes:
        """Answer `/pause` or `/resume`. An epoch that is not newer answers the present state."""
        registry = self._registry
        live = await registry.find(owner, request.task_id)
        async with live.lock:
            await self._endings.expire_if_overdue(live)
            decide = lifecycle.pause if paused else lifecycle.resume
            now_s = registry.time.now_s()
            after = decide(live.task, request.epoch, now_s)
            if after is not live.task:
                moved = after.state is not live.task.state
                events = (Event(after.state.value, now_s, f"epoch {after.epoch}"),) if moved else ()
                await registry.commit(live, after, events=events)
            answer = answers.epoch_answer(live.task, now_s)
            want = live.task.state is TaskState.PAUSED
        if want != live.peer_paused and lifecycle.is_open(live.task):
            registry.spawn(self.settle(live), f"tide-tell-{request.task_id}")
        return answer

    async def settle(self, live: Live) -> None:
        """Tell the environment server until it knows whether the task is paused. Safe to repeat.

        A server that does not listen is written down; the clocks that count are ours and have stopped already.
        """
        async with live.peer_lock:
            while lifecycle.is_open(live.task) and live.server is not None:
                want = live.task.state is TaskState.PAUSED
                if want == live.peer_paused:
                    return
                live.peer_paused = want
                try:
                    # Row versions only grow, so that a late message can never undo a newer one.
                    await upstream.pause(
                        live.server, live.task.peer_task, paused=want, epoch=live.task.version,
                        timeout_s=TELL_TIMEOUT_S,
                    )  # fmt: skip
                except (TimeoutError, upstream.EnvironmentFailed, upstream.EnvironmentLost) as error:
                    log.warning("task %s: telling the environment failed: %s", live.task.task_id, error)
                    return
