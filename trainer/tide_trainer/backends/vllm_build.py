"""Builds vLLM's engine core in this process. Importing vllm takes seconds, so nothing else imports this early."""

from __future__ import annotations

import tempfile
from typing import Any

from tide_trainer.backends.vllm_settings import VllmSettings


def build(settings: VllmSettings) -> Any:
    """Loads the model and allocates the KV cache; returns vLLM's `EngineCore`, to be run by the calling thread."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from tide_trainer.backends.vllm_worker import disable_prepacking

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


def request_types() -> tuple[Any, Any]:
    """(SamplingParams, EngineCoreRequest) of vLLM."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return SamplingParams, EngineCoreRequest
