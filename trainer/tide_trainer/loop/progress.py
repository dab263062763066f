"""What the live view shows between records: buffers, ranks, tasks, alarms. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tide_trainer.loop.engine_watch import EngineWatch
from tide_trainer.scheduling.plan import SchedulerView
from tide_trainer.scheduling.staleness import BufferView


def progress(buffers: Sequence[BufferView], size: int, view: SchedulerView, watch: EngineWatch) -> dict[str, Any]:
    """The fields of a `progress` record.

    Args:
        buffers: the staleness buffers.
        size: groups that a buffer takes.
        view: the scheduler's counters.
        watch: the engines' own measurements, and what does not fit.
    """
    return {
        "buffers": [
            {
                "version": buffer.version,
                "state": buffer.state.value,
                "occupied": buffer.num_occupied,
                "reserved": buffer.num_reserved,
                "size": size,
            }
            for buffer in buffers
        ],
        "ranks": [
            {
                "rank": str(rank.rank),
                "role": "rollout",
                "version": rank.version,
                "usage_tokens": rank.usage_tokens,
                "budget_tokens": rank.budget_tokens,
                "measured_tokens": watch.used_tokens(rank.rank),
                "num_active": rank.num_tasks - rank.num_waiting,
                "num_paused": rank.num_waiting,
            }
            for rank in view.ranks
        ],
        "num_queued": view.num_queued,
        "num_active": view.num_generating + view.num_acting + view.num_held,
        "num_paused": view.num_paused,
        **watch.shown(),
    }
