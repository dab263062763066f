"""vLLM's scheduler with a window: live counts for footprints and budgets, read between or during forward passes; and
with an eye on images: what the vision tower is to see is read before it is scheduled.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tide_trainer.backends.vllm_pixels import Pixels
from tide_trainer.errors import ImageFailed, ImageRefused

_LOG = logging.getLogger(__name__)


class TideScheduler(Scheduler):
    """Schedules exactly as vLLM does, but for requests whose image is lost. What is added never raises: that would kill
    the engine.
    """

    num_preemptions = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: list[Pixels] = []
        self._lost: dict[str, str] = {}
        self._unread: set[str] = set()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; the patches that were held for the forward pass before are let go."""
        for pixels in self._held:
            pixels.release()
        self._held.clear()
        return super().schedule(*args, **kwargs)

    def take_lost(self) -> dict[str, str]:
        """Request id -> why it cannot go on, since the last call; it is not scheduled, and must be ended."""
        lost, self._lost = self._lost, {}
        return lost

    def counts(self) -> tuple[int, int, int]:
        """(running requests, waiting requests, KV blocks that requests hold); -1 each where vLLM changed inside.

        Never zeros in that case: an engine that looks empty would be filled without end.
        """
        try:
            num_waiting = len(self.waiting) + len(self.kv_holding_waiting) + len(self.deferred_waiting)
            pool = self.kv_cache_manager.block_pool
            # One block is vLLM's null block, never free and never held.
            return len(self.running), num_waiting, max(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), 0)
        except Exception:  # noqa: BLE001 - it must not kill the engine
            self._cannot_read("the scheduler's counts")
            return -1, -1, -1

    def live_requests(self) -> dict[str, tuple[int, int]] | None:
        """Request id -> (computed tokens, KV blocks held); None where vLLM changed inside.

        To be called between forward passes. Costs the engine nothing but this call: nothing is kept at each step.
        """
        try:
            managers = self.kv_cache_manager.coordinator.single_type_managers
            return {
                name: (request.num_computed_tokens, sum(len(m.req_to_blocks.get(name, ())) for m in managers))
                for name, request in self.requests.items()
            }
        except Exception:  # noqa: BLE001 - it must not kill the engine
            self._cannot_read("the scheduler's requests")
            return None

    def num_cached_blocks(self) -> int:
        """Blocks that the prefix cache would find; -1 where vLLM changed inside."""
        try:
            return len(self.kv_cache_manager.block_pool.cached_block_hash_to_block)
        except Exception:  # noqa: BLE001 - it must not kill the engine
            self._cannot_read("the prefix cache")
            return -1

    def num_cached_images(self) -> int:
        """Images whose encoded form the next prompt would find; -1 where vLLM changed inside."""
        try:
            return len(self.encoder_cache_manager.cached)
        except Exception:  # noqa: BLE001 - it must not kill the engine
            self._cannot_read("the encoder cache")
            return -1

    def _cannot_read(self, what: str) -> None:
        # Polled every second: told once.
        if what not in self._unread:
            self._unread.add(what)
            _LOG.exception("%s cannot be read", what)

    def _try_schedule_encoder_inputs(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with the patches of each image in memory until the vision tower has seen them.

        An error in the forward pass would be everybody's; here it is that of the request alone.
        """
        found = super()._try_schedule_encoder_inputs(request, *args, **kwargs)
        for index in found[0]:
            pixels = request.mm_features[index].data["pixel_values"]
            try:
                pixels.hold()
            except (ImageFailed, ImageRefused) as error:
                self._lost[request.request_id] = str(error)
                budget = args[2] if len(args) > 2 else kwargs["encoder_compute_budget"]
                return [], 0, budget, [], []
            self._held.append(pixels)
        return found

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)
