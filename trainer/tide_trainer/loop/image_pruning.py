"""Removes images that nobody can ask for any more, so that a long run's folder stays as large as its work in flight.

    oldest group that is not trained, oldest attempt that is not over -> what was put before both is nobody's
    recorded trajectories, the parity sample                          -> stay

A session puts each of its images again (`ImageStore.put` makes it young), also one that another session has put before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from tide_trainer.images import ImageStore

_LOG = logging.getLogger(__name__)
MARGIN_S = 60.0
"""Younger images stay in any case: the clock may have been set."""


@dataclass(frozen=True, slots=True)
class ImagePruning:
    """Prunes the run's images; to be called after a train step.

    Args:
        store: the run's images.
        oldest_s: each gives the Unix time from which on images are needed, None for none.
        recorded: digests that recorded trajectories show; None while that is not known.
        keep: further digests.
        now: Unix time.
    """

    store: ImageStore
    oldest_s: Sequence[Callable[[], float | None]]
    recorded: Callable[[], Awaitable[Collection[str] | None]]
    keep: frozenset[str] = frozenset()
    now: Callable[[], float] = time.time

    async def prune(self) -> int:
        """Removes what is nobody's; how many. A disk that refuses is only told: the run can go on without."""
        moments = [self.now(), *(moment for oldest in self.oldest_s if (moment := oldest()) is not None)]
        recorded = await self.recorded()
        if recorded is None:
            return 0
        keep = self.keep.union(recorded)
        try:
            num, num_bytes = await asyncio.to_thread(self.store.prune, min(moments) - MARGIN_S, keep)
        except OSError as error:
            _LOG.warning("old images in %s cannot be removed: %s", self.store.folder, error)
            return 0
        if num:
            _LOG.info("%d images of %d bytes that nobody needs are removed", num, num_bytes)
        return num
