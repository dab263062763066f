"""Group commits: one transaction for all changes that wait.

    commit(change) -> [waiting, bounded] -> one transaction at a time -> each caller hears of its own change

Consumes changes, waits for the writer thread, unblocks the callers. While one transaction runs the next group gathers,
so the group grows with the load and a lone change waits for nothing.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from tide_gateway.database import OutcomeUnknown
from tide_gateway.repository import StorageFailed
from tide_gateway.rows import Change
from tide_sdk.errors import TideError

MAX_WAITING = 65_536
MAX_GROUP = 256
MAX_WAIT_S = 30.0
"""A change that the groups before it kept waiting for longer is not written any more."""


class Sink(Protocol):
    """What commits a group; `Repository` is one."""

    async def apply(self, changes: list[Change]) -> list[Exception | None]:
        """Commit the group; one entry per change, None where it was committed."""
        ...


class Written(asyncio.Future[None]):
    """Whether a change was committed. Who waits for it hears that first, even if it is cancelled meanwhile."""

    def cancel(self, msg: object = None) -> bool:
        """Nothing: a commit that was asked for is not taken back."""
        return False


class Committer:
    """Groups the changes of many tasks.

    Args:
        sink: where groups are committed.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: list[tuple[Change, Written, float]] = []
        self._running: asyncio.Task[None] | None = None
        self.num_groups = 0
        self.num_changes = 0

    def commit(self, change: Change) -> Written:
        """Commit a change with the next group; what is given is done then, with `Conflict` if the stored row is newer,
        or with `StorageFailed`, also where it waited for longer than `MAX_WAIT_S`.

        Raises:
            TideError: too many changes wait.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise TideError("unavailable", "too many writes wait; call again", retry_after_s=1)
        loop = asyncio.get_running_loop()
        done = Written(loop=loop)
        self._waiting.append((change, done, loop.time()))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="tide-commit")
        return done

    async def close(self) -> None:
        """Wait until everything that waits is committed. The caller sets the deadline."""
        while self._running is not None:
            await asyncio.wait({self._running})

    async def _run(self) -> None:
        # Let all callbacks that are ready now add their changes to this group.
        await asyncio.sleep(0)
        try:
            while self._waiting:
                self._give_up_old()
                group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
                if not group:
                    break
                try:
                    outcomes = await self._sink.apply([change for change, _, _ in group])
                except Exception as error:  # noqa: BLE001 (every waiter is told)
                    outcomes = [error] * len(group)
                except BaseException:
                    self._break_off(group)
                    raise
                self.num_groups += 1
                self.num_changes += len(group)
                for (_, done, _), failure in zip(group, outcomes, strict=True):
                    if failure is None:
                        done.set_result(None)
                    else:
                        done.set_exception(failure)
        finally:
            self._running = None

    def _break_off(self, group: list[tuple[Change, Written, float]]) -> None:
        """Fail all that waits, as the event loop ends: nothing else would ever wake who waits for it."""
        left, self._waiting = group + self._waiting, []
        for _, done, _ in left:
            done.set_exception(OutcomeUnknown("the gateway ends while it is written"))
            done.exception()  # who waits for it may have gone

    def _give_up_old(self) -> None:
        """Fail what has waited for too long: its caller is told before it gives up by itself."""
        oldest_s = asyncio.get_running_loop().time() - MAX_WAIT_S
        late = sum(asked_s < oldest_s for _, _, asked_s in self._waiting)
        for _, done, _ in self._waiting[:late]:
            done.set_exception(StorageFailed(f"it waited for more than {MAX_WAIT_S:g} s for the changes before it"))
        del self._waiting[:late]
