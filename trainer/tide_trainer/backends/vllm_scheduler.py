"""vLLM's scheduler with a window: live counts for footprints and budgets, read between or during forward passes."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

_LOG = logging.getLogger(__name__)


class TideScheduler(Scheduler):
    """Schedules exactly as vLLM does. What is added only reads and never raises: that would kill the engine."""

    num_preemptions = 0

    def counts(self) -> tuple[int, int, int]:
        """(running requests, waiting requests, KV blocks that requests hold); zeros where vLLM changed inside."""
        try:
            num_waiting = len(self.waiting) + len(self.kv_holding_waiting) + len(self.deferred_waiting)
            pool = self.kv_cache_manager.block_pool
            # One block is vLLM's null block, never free and never held.
            return len(self.running), num_waiting, max(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), 0)
        except Exception:  # noqa: BLE001 - it must not kill the engine
            _LOG.exception("the scheduler's counts cannot be read")
            return 0, 0, 0

    def live_requests(self) -> dict[str, tuple[int, int]]:
        """Request id -> (computed tokens, KV blocks held); to be called between forward passes."""
        try:
            managers = self.kv_cache_manager.coordinator.single_type_managers
            return {
                name: (request.num_computed_tokens, sum(len(m.req_to_blocks.get(name, ())) for m in managers))
                for name, request in self.requests.items()
            }
        except Exception:  # noqa: BLE001 - it must not kill the engine
            _LOG.exception("the scheduler's requests cannot be read")
            return {}

    def num_cached_blocks(self) -> int:
        """Blocks that the prefix cache would find; -1 where vLLM changed inside."""
        try:
            return len(self.kv_cache_manager.block_pool.cached_block_hash_to_block)
        except Exception:  # noqa: BLE001 - it must not kill the engine
            _LOG.exception("the prefix cache cannot be read")
            return -1

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)
