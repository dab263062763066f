"""The open tasks as this process sees them: a cache of rows, and what is in flight for each.

A `Live` holds the row last read or committed. All decisions on a task are made under its lock, from that row, and take
effect only with a commit that checks the row's version; a stale cache loses and is read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from tide_gateway.committer import Committer
from tide_gateway.fleet import Host
from tide_gateway.lifecycle import Task
from tide_gateway.repository import Conflict, Repository, StorageFailed
from tide_gateway.rows import Change, Event, Intent, Result
from tide_gateway.runtimes import Server
from tide_gateway.timekeeping import Timekeeper
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError

log = logging.getLogger(__name__)

STORAGE_LOG_EVERY_S = 1.0
"""A full disk fails every write; it is logged once in that many seconds."""


def unfinished() -> TideError:
    """The error of a call whose work was broken off under it, by a stop of the gateway or by a fault that is logged."""
    return TideError("unavailable", "the gateway did not finish the call; call again", retry_after_s=1)


@dataclass(eq=False, slots=True)
class Running:
    """An action in flight.

    Attributes:
        answer: what all calls for this turn wait for.
        worker: sends the action; cancelled when the task is ended under it.
    """

    turn: int
    message: dict[str, Any]
    answer: asyncio.Future[bytes]
    worker: asyncio.Task[None] | None = None

    def fail(self, error: TideError) -> None:
        """Give all waiting calls the error and stop sending."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # nobody may be waiting any more, which is no fault
        if self.worker is not None:
            self.worker.cancel()


@dataclass(eq=False, slots=True)
class Live:
    """One open task.

    Attributes:
        task: the row as last read or committed.
        host: its place in the fleet, and with it a slot; None before and after.
        server: its environment server, kept here because the host forgets a dead one.
        starting: the start in flight.
        running: the action in flight.
        releasing: the release of its environment, in flight or over.
        peer_lock: orders what is said to the environment server about pauses.
        peer_paused: what the server was last told.
        has_slot: a slot of the fleet is taken for it.
    """

    task: Task
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    host: Host | None = None
    server: Server | None = None
    starting: asyncio.Task[None] | None = None
    started: asyncio.Future[bytes] | None = None
    running: Running | None = None
    releasing: asyncio.Task[None] | None = None
    peer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    peer_paused: bool = False
    has_slot: bool = False


class Registry:
    """Finds open tasks, and commits their changes.

    Args:
        repository: reads.
        committer: writes.
        time: the moment of every change.
    """

    def __init__(self, repository: Repository, committer: Committer, time: Timekeeper) -> None:
        self.repository = repository
        self.committer = committer
        self.time = time
        self.lives: dict[str, Live] = {}
        self.closed = False
        self._background: set[asyncio.Task[Any]] = set()
        self._logged_s = -STORAGE_LOG_EVERY_S

    async def find(self, owner: str, task_id: str) -> Live:
        """The task of that id.

        Raises:
            TideError: no such task of this owner.
        """
        live = self.lives.get(task_id)
        if live is None:
            task = await self.repository.task(task_id)
            if task is None or task.owner != owner:
                raise TideError("not_found", f"no task {task_id!r} of yours")
            live = self.adopt(task)
        if live.task.owner != owner:
            raise TideError("not_found", f"no task {task_id!r} of yours")
        return live

    def adopt(self, task: Task) -> Live:
        """The one `Live` of a task; a task that has ended never changes again and is not kept."""
        if task.state is TaskState.ENDED:
            return Live(task)
        return self.lives.setdefault(task.task_id, Live(task))

    def forget(self, live: Live) -> None:
        """Drop a task that nothing is in flight for; its row is the truth."""
        if self.lives.get(live.task.task_id) is live:
            del self.lives[live.task.task_id]

    async def create(self, task: Task, *, request: bytes, events: tuple[Event, ...]) -> None:
        """Commit the first row of a new task.

        Raises:
            TideError: it could not be written; there is no such task.
        """
        try:
            await self.committer.commit(Change(task, request=request, events=events))
        except TideError:
            raise
        except Exception as error:
            raise self._unwritten(task.task_id, error) from error

    async def commit(
        self,
        live: Live,
        after: Task,
        *,
        first: bytes | None = None,
        intent: Intent | None = None,
        result: Result | None = None,
        events: tuple[Event, ...] = (),
    ) -> None:
        """Commit the task's next row; the caller holds the lock. `live.task` is the new row when this returns.

        A cancelled caller still waits for the outcome, so that cache and row never part.

        Raises:
            TideError: the row was changed elsewhere, or could not be written; the task is read again next time.
        """
        if self.closed:
            raise TideError("unavailable", "the gateway is stopping; call again later", retry_after_s=5)
        after = replace(after, version=live.task.version + 1)
        change = Change(after, first=first, intent=intent, result=result, events=events)
        write = asyncio.ensure_future(self.committer.commit(change))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await asyncio.wait({write})
            if write.exception() is None:
                live.task = after
            raise
        except Conflict as error:
            stored = await self.repository.task(live.task.task_id)
            if stored is not None:
                live.task = stored
            raise TideError("unavailable", "the task was changed elsewhere; call again", retry_after_s=1) from error
        except TideError:
            raise
        except Exception as error:
            raise self._unwritten(live.task.task_id, error) from error
        live.task = after

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run work that outlives the call that began it; a failure of it is logged."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._over)
        return task

    async def drain(self) -> None:
        """Cancel all background work and wait until it is over."""
        while self._background:
            for task in self._background:
                task.cancel()
            await asyncio.wait(self._background)

    def _unwritten(self, task_id: str, error: Exception) -> TideError:
        """The error of a caller whose change was not written; logged here."""
        if not isinstance(error, StorageFailed):
            log.error("a change of task %s could not be written", task_id, exc_info=error)
            return TideError("unavailable", "the database did not take the change; call again", retry_after_s=1)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= STORAGE_LOG_EVERY_S:
            self._logged_s = now_s
            log.error("a change of task %s could not be written: %s", task_id, error)
        return TideError("unavailable", f"the database does not take changes: {error}; call again", retry_after_s=1)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, TideError):  # a write that failed, which is logged, or a gateway that stops
            log.debug("background work %s failed: %s", task.get_name(), error)
        else:
            log.error("background work %s failed", task.get_name(), exc_info=error)
