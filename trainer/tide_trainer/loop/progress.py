"""What the live view shows between records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tide_trainer.scheduling.plan import SchedulerView
from tide_trainer.scheduling.staleness import BufferView
from tide_trainer.types import RankId


def progress(
    buffers: Iterable[BufferView], batch_size: int, view: SchedulerView, version_of: Callable[[RankId], int]
) -> dict[str, Any]:
    """Buffers, rollout ranks and counts of tasks, as plain data.

    Args:
        buffers: the staleness buffers.
        batch_size: groups of a train step.
        view: the scheduler's counters.
        version_of: the model version that a rollout rank serves.
    """
    return {
        "buffers": [
            {
                "version": buffer.version,
                "state": buffer.state.value,
                "occupied": buffer.num_occupied,
                "reserved": buffer.num_reserved,
                "size": batch_size,
            }
            for buffer in buffers
        ],
        "ranks": [
            {
                "rank": str(rank.rank),
                "role": "rollout",
                "version": version_of(rank.rank),
                "usage_tokens": rank.usage_tokens,
                "budget_tokens": rank.budget_tokens,
                "num_active": rank.num_tasks - rank.num_waiting,
                "num_paused": rank.num_waiting,
            }
            for rank in view.ranks
        ],
        "num_queued": view.num_queued,
        "num_active": view.num_generating + view.num_acting + view.num_held,
        "num_paused": view.num_paused,
    }
