"""Builds vLLM's engine core in this process. Importing vllm takes seconds, so nothing else imports this early."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tide_trainer import types
from tide_trainer.backends.vllm_settings import VllmSettings
from tide_trainer.errors import EngineFailed
from tide_trainer.images import ImageTokens


def build(settings: VllmSettings, tokens: ImageTokens | None) -> Any:
    """Loads the model and allocates the KV cache; returns vLLM's `EngineCore`, to be run by the calling thread.

    Args:
        settings: the engine.
        tokens: how the model takes images; None where it takes none.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from tide_trainer.backends.vllm_worker import disable_prepacking

    if tokens is not None:
        from tide_trainer.backends import vllm_images

        vllm_images.register(settings.model_path, tokens)
    arguments = EngineArgs(
        model=settings.model_path,
        skip_tokenizer_init=True,
        dtype=settings.dtype,  # type: ignore[arg-type]
        seed=settings.seed,
        max_model_len=settings.max_context_tokens,
        max_num_seqs=settings.max_running,
        max_num_batched_tokens=max(settings.max_batched_tokens, settings.max_running),
        block_size=settings.block_tokens,  # type: ignore[arg-type]
        # One more: vLLM keeps a null block for itself.
        num_gpu_blocks_override=settings.num_blocks + 1,
        enable_prefix_caching=True,
        enforce_eager=settings.enforce_eager,
        scheduling_policy="priority",
        scheduler_cls="tide_trainer.backends.vllm_scheduler.TideScheduler",
        worker_extension_cls="tide_trainer.backends.vllm_worker.WeightLoader",
        distributed_executor_backend="uni",
        logprobs_mode="raw_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        # Images come as patches already (`vllm_images`): nothing to cache, and no dummy image to measure with.
        mm_processor_cache_gb=0,
        skip_mm_profiling=True,
    )
    config = arguments.create_engine_config()
    disable_prepacking()
    # vLLM leaves the file in which its one process "meets"; nobody opens it after the boot.
    with tempfile.TemporaryDirectory(prefix="tide-vllm-") as folder:
        tempfile.tempdir = folder
        try:
            core = EngineCore(config, Executor.get_class(config), log_stats=False)
        finally:
            tempfile.tempdir = None
    core.collective_rpc("tide_bind_kernels")
    return core


class Requests:
    """Makes vLLM's requests.

    Args:
        core: the engine core that takes them.
        forbidden_ids: never sampled.
    """

    def __init__(self, core: Any, forbidden_ids: Sequence[int]) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._core = core
        self._sampling_params = SamplingParams
        self._request = EngineCoreRequest
        self._bias = dict.fromkeys(forbidden_ids, -math.inf) or None

    def make(
        self, request_id: str, prompt_ids: list[int], sampling: types.Sampling, priority: int, features: Any
    ) -> Any:
        """A request for `EngineCore.add_request`; `features` are the prompt's images (`vllm_images.features`).

        Raises:
            EngineFailed: vLLM took another number of ids than it was given.
        """
        params = self._sampling_params(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            logit_bias=self._bias,
            logprobs=0,
            detokenize=False,
            skip_clone=True,
        )
        request = self._request(
            request_id, prompt_ids, features, params, None, time.time(), None, None, None, priority=priority
        )
        made = self._core.preprocess_add_request(request)[0]
        if made.num_prompt_tokens != len(prompt_ids):
            raise EngineFailed(f"{len(prompt_ids)} prompt ids were sent and vLLM counts {made.num_prompt_tokens}")
        return made
