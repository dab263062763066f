"""The open tasks as this process sees them: rows last read, and what is in flight here for each.

A `Live` is a cache. All decisions on a task are made under its lock, from the row that it holds, and take effect only
with a commit that checks the row's version: if another replica was faster, the row is read again and the decision is
made again (`Registry.decide`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tide_gateway.committer import Committer
from tide_gateway.lifecycle import Task, bumped
from tide_gateway.log_lines import working_on
from tide_gateway.members import Members
from tide_gateway.metrics import Metrics
from tide_gateway.repository import Conflict, Repository, StorageFailed
from tide_gateway.rows import Change, Event, Intent, Result, StoredImage
from tide_gateway.timekeeping import Timekeeper
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError

T = TypeVar("T")
log = logging.getLogger(__name__)

STORAGE_LOG_EVERY_S = 1.0
"""A full disk fails every write; it is logged once in that many seconds."""
MAX_CONFLICTS = 50
"""Times that a decision is made again because others were faster."""


class Changed(Exception):
    """The task's row was changed by another replica; `Live.task` is the new row."""


def unfinished() -> TideError:
    """The error of a call whose work was broken off under it, by a stop of the gateway or by a fault that is logged."""
    return TideError("unavailable", "the gateway did not finish the call; call again", retry_after_s=1)


def removed(task_id: str) -> TideError:
    """The error of a call for a task whose row is gone: it was over, and removed (`--retention-days`, `prune`)."""
    return TideError("not_found", f"task {task_id!r} was over and is removed")


@dataclass(eq=False, slots=True)
class Running:
    """An action in flight.

    Attributes:
        action: the message as JSON.
        answer: what all calls for this turn wait for.
        worker: sends the action, or follows the replica that does.
        sends: True if it is this replica that sends.
    """

    turn: int
    message: dict[str, Any]
    action: bytes
    answer: asyncio.Future[bytes]
    worker: asyncio.Task[None] | None = None
    sends: bool = True

    def fail(self, error: TideError) -> None:
        """Give all waiting calls the error and stop sending."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # nobody may be waiting any more, which is no fault
        if self.worker is not None:
            self.worker.cancel()


@dataclass(eq=False, slots=True)
class Live:
    """One task.

    Attributes:
        task: the row as last read or committed.
        starting: the start in flight, here or followed; `started` is what its callers wait for.
        follows: `starting` only looks how the start goes on elsewhere.
        running: the action in flight, here or followed.
        releasing: the release of its environment, in flight or over.
        peer_lock: orders what is said to the environment server about pauses.
        num_ends: calls of `/end` that wait for the release.
        told: epoch and pause that this replica last told the environment server; None before it has.
    """

    task: Task
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    starting: asyncio.Task[None] | None = None
    started: asyncio.Future[bytes] | None = None
    follows: bool = False
    running: Running | None = None
    releasing: asyncio.Task[None] | None = None
    peer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    told: tuple[int, bool] | None = None
    num_ends: int = 0

    @property
    def releases(self) -> bool:
        """True while this process lets go of the task's environment: nobody else may, unless a commit tells."""
        return self.releasing is not None and not self.releasing.done()

    @property
    def busy(self) -> bool:
        """True while something is in flight for it in this process."""
        return (
            self.lock.locked()
            or self.peer_lock.locked()
            or self.running is not None
            or any(work is not None and not work.done() for work in (self.starting, self.releasing))
        )

    @property
    def works(self) -> bool:
        """True while this process does what the task's worker has to do, and does not only look on."""
        return (
            (self.running is not None and self.running.sends)
            or (self.starting is not None and not self.starting.done() and not self.follows)
            or self.releases
        )

    def fail_start(self, error: TideError) -> None:
        """Give all who wait for the start the error."""
        if self.started is not None and not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # the caller may have gone


class Registry:
    """Finds tasks, and commits their changes.

    Args:
        repository: reads.
        committer: writes.
        time: the moment of every change.
        members: this replica and the others.
        metrics: what this process counts.
    """

    def __init__(
        self, repository: Repository, committer: Committer, time: Timekeeper, members: Members, metrics: Metrics
    ) -> None:
        self.repository = repository
        self.committer = committer
        self.time = time
        self.members = members
        self.metrics = metrics
        self.lives: dict[str, Live] = {}
        self.closed = False
        self.draining = False
        self._background: set[asyncio.Task[Any]] = set()
        self._logged_s = -STORAGE_LOG_EVERY_S

    @property
    def me(self) -> str:
        """This replica's name, which is written into the rows that it works on."""
        return self.members.me.name

    async def find(self, owner: str | None, task_id: str) -> Live:
        """The task of that id, as its row is now; `owner` None finds everyone's.

        Raises:
            TideError: no such task of this owner.
        """
        live = self.lives.get(task_id)
        if live is None or self.repository.shared:
            # Another replica may have changed the row since this one last saw it.
            task = await self.repository.task(task_id)
            live = None if task is None else self.adopt(task)
        if live is None or (owner is not None and live.task.owner != owner):
            raise TideError("not_found", f"no task {task_id!r} of yours")
        return live

    def adopt(self, task: Task) -> Live:
        """The one `Live` of a task, with this row if it is newer. A task that has ended is not kept."""
        live = self.lives.get(task.task_id)
        if live is None:
            live = Live(task)
            if task.state is not TaskState.ENDED:
                self.lives[task.task_id] = live
        elif task.version > live.task.version:
            live.task = task
        return live

    def forget(self, live: Live) -> None:
        """Drop a task that nothing is in flight for; its row is the truth."""
        if self.lives.get(live.task.task_id) is live:
            del self.lives[live.task.task_id]

    async def decide(self, live: Live, step: Callable[[], Awaitable[T]]) -> T:
        """Run a decision under the task's lock, again from the new row each time that another replica was faster."""
        working_on.set(live)
        async with live.lock:
            for _ in range(MAX_CONFLICTS):
                try:
                    return await step()
                except Changed:
                    continue
        raise TideError("unavailable", "the task is changed elsewhere all the time; call again", retry_after_s=1)

    async def commit(
        self,
        live: Live,
        after: Task,
        *,
        first: bytes | None = None,
        intent: Intent | None = None,
        result: Result | None = None,
        events: tuple[Event, ...] = (),
        images: tuple[StoredImage, ...] = (),
    ) -> None:
        """Commit the task's next row, made from the row that `after` still has the version of. The caller holds the
        lock, inside `decide`. `live.task` is the new row when this returns.

        A cancelled caller still waits for the outcome, so that cache and row never part.

        Raises:
            Changed: another replica was faster.
            TideError: it could not be written.
        """
        if self.closed or (self.draining and intent is not None):
            raise TideError("unavailable", "the gateway is stopping; call again", retry_after_s=1)
        after = bumped(after)
        change = Change(after, first=first, intent=intent, result=result, events=events, images=images)
        written = self.committer.commit(change)
        try:
            await written
        except asyncio.CancelledError:
            if written.exception() is None:
                self.advance(live, after)
            raise
        except Conflict as error:
            stored = await self.repository.task(live.task.task_id)
            if stored is None:
                raise removed(live.task.task_id) from error
            live.task = stored
            raise Changed from error
        except TideError:
            raise
        except Exception as error:
            raise self.unwritten(live.task.task_id, error) from error
        self.advance(live, after)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run work that outlives the call that began it; a failure of it is logged.

        Work that a stop no longer waits for is broken off where it first waits, so that it tells its callers.
        """
        task = asyncio.create_task(work, name=name)
        if self.closed:
            asyncio.get_running_loop().call_soon(task.cancel)
        self._background.add(task)
        task.add_done_callback(self._over)
        return task

    async def drain(self) -> None:
        """Cancel all background work and wait until it is over. The caller sets the deadline."""
        while self._background:
            for task in self._background:
                task.cancel()
            await asyncio.wait(self._background)

    def in_flight(self) -> list[str]:
        """The names of the background work that goes on."""
        return sorted(task.get_name() for task in self._background)

    def unwritten(self, task_id: str, error: Exception) -> TideError:
        """The error of a caller whose change was not written; logged here."""
        if not isinstance(error, StorageFailed):
            log.error("a change of task %s could not be written", task_id, exc_info=error)
            return TideError("unavailable", "the database did not take the change; call again", retry_after_s=1)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= STORAGE_LOG_EVERY_S:
            self._logged_s = now_s
            log.error("a change of task %s could not be written: %s", task_id, error)
        return TideError("unavailable", f"the database does not take changes: {error}; call again", retry_after_s=1)

    @staticmethod
    def advance(live: Live, row: Task) -> None:
        """Take a row into the cache if it is newer than what is there."""
        if row.version > live.task.version:
            live.task = row

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, (TideError, StorageFailed)):  # a write that failed, or a gateway that stops
            log.debug("background work %s failed: %s", task.get_name(), error)
        else:
            log.error("background work %s failed", task.get_name(), exc_info=error)
