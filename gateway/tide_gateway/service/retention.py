"""Removes what is over for longer than it is kept: tasks with all their rows, large bodies, logs of servers.

    every minute -> tasks that were over before now - retention, some rows a transaction -> expired places in queues
    every hour   -> bodies that no row names any more, halves of bodies -> logs of servers that are gone

One replica does it, the one that leads. Back-pressure: after each batch it waits four times as long as that took, so
that turns have four fifths of the database's writer at least.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tide_gateway.blobs import GRACE_S, BlobStore
from tide_gateway.members import Members
from tide_gateway.repository import InstanceRows, StorageFailed
from tide_gateway.repository.retention import RetentionRows
from tide_gateway.timekeeping import Timekeeper

TASKS_S = 60.0
FILES_S = 3600.0
MIN_PAUSE_S = 0.05
PAUSE_RATIO = 4.0
DAY_S = 86400.0
_DRIVER_LOG = "ray-driver-"
"""Logs of the gateway's own helpers, which are open for as long as it runs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Files:
    """How many files were removed."""

    bodies: int
    logs: int


class Retention:
    """Removes what is older than `retention_s`.

    Args:
        rows: the tables.
        instances: the servers whose logs stay.
        blobs: large bodies.
        logs: the folder of servers' logs.
        clock: the moment.
        retention_s: seconds that what is over is kept.
        forget: told the ids of tasks that are gone.
        grace_s: seconds that large bodies are kept on top.
    """

    def __init__(
        self,
        rows: RetentionRows,
        instances: InstanceRows,
        blobs: BlobStore,
        logs: Path,
        clock: Timekeeper,
        retention_s: float,
        *,
        forget: Callable[[Sequence[str]], None] = lambda task_ids: None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._rows = rows
        self._instances = instances
        self._blobs = blobs
        self._logs = logs
        self._clock = clock
        self._retention_s = retention_s
        self._forget = forget
        self._grace_s = grace_s

    async def run(self, members: Members) -> None:
        """Remove for ever, while this replica leads; what failed is logged and tried again."""
        loop = asyncio.get_running_loop()
        files_s = loop.time() + TASKS_S
        while True:
            await asyncio.sleep(TASKS_S)
            if not members.leads or members.lapsed(loop.time()):
                continue
            try:
                await self.tasks()
                if loop.time() >= files_s:
                    files_s = loop.time() + FILES_S
                    await self.files()
            except (StorageFailed, OSError) as error:
                log.warning("what is over could not be removed, and is tried again: %s", error)
            except Exception:
                log.exception("removing what is over failed")

    async def tasks(self) -> int:
        """Remove all tasks that are over for long enough, in batches; how many.

        Raises:
            StorageFailed: the database does not take it; what was removed stays so.
        """
        loop = asyncio.get_running_loop()
        before_s, num_removed, more = self._before_s(), 0, True
        while more:
            began_s = loop.time()
            removed = await self._rows.remove_tasks(before_s)
            more, num_removed = removed.more, num_removed + len(removed.task_ids)
            self._forget(removed.task_ids)
            if more:
                await asyncio.sleep(max(MIN_PAUSE_S, PAUSE_RATIO * (loop.time() - began_s)))
        await self._rows.remove_tickets(before_s)
        if num_removed:
            log.info("%d tasks that were over for %g days are removed", num_removed, self._retention_s / DAY_S)
        return num_removed

    async def files(self) -> Files:
        """Remove bodies that no row names any more, and logs of servers that are gone; call it after `tasks`.

        Raises:
            StorageFailed: the database does not answer; nothing more was removed.
            OSError: the folder cannot be read or written.
        """
        # First the files, then the rows: whatever is named from here on is touched.
        old = await asyncio.to_thread(self._blobs.find_old, self._retention_s + self._grace_s)
        if old.names:
            async with contextlib.aclosing(self._rows.bodies_in_use()) as pages:
                async for names in pages:
                    old.names.difference_update(names)
                    await asyncio.sleep(MIN_PAUSE_S)
        num_bodies = await asyncio.to_thread(self._blobs.remove, old)
        known = {row.name for row in await self._instances.all()}
        num_logs = await asyncio.to_thread(remove_logs, self._logs, known, self._retention_s)
        if num_bodies or num_logs:
            log.info("%d large bodies and %d logs of servers are removed", num_bodies, num_logs)
        return Files(num_bodies, num_logs)

    def _before_s(self) -> float:
        return self._clock.now_s() - self._retention_s


def remove_logs(folder: Path, known: Collection[str], older_than_s: float) -> int:
    """Remove logs of servers that are not known any more and into which nothing was written for so long; how many."""
    before_s, num_removed = time.time() - older_than_s, 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(".log")
            if name == entry.name or name in known or name.startswith(_DRIVER_LOG):
                continue
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < before_s:
                    os.unlink(entry.path)
                    num_removed += 1
    return num_removed
