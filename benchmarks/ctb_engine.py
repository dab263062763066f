"""The engine of `bench_ctb`: a vLLM server process as the product boots it, with a model of 20 M parameters."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ctb_workload import VOCABULARY
from processes import run_command

from tide_trainer.backends import weights_io
from tide_trainer.backends.vllm_engine import VllmEngine
from tide_trainer.backends.vllm_settings import VllmSettings
from tide_trainer.cluster.local import LocalProcesses
from tide_trainer.engine_client import EngineClient
from tide_trainer.simulation.policies import rank_ids
from tide_trainer.types import EngineInfo, EngineStats, WeightUpdate

(RANK,) = rank_ids(1)
BLOCK_TOKENS = 32
MAX_CONTEXT_TOKENS = 1280
_SHAPE = {"seed": 0, "hidden": 512, "layers": 6, "heads": 16, "kv_heads": 4, "feed_forward": 1536}
_MAKE_TIMEOUT_S = 300.0
_READY_TIMEOUT_S = 400.0
_CALL_TIMEOUT_S = 600.0


def words() -> list[str]:
    """The model's vocabulary: the prompts are token ids, so that any words do."""
    return [f"w{number}" for number in range(VOCABULARY)]


def make_model(folder: Path) -> Path:
    """Writes the model's folder, in a process of its own."""
    told = folder / "make_model.json"
    model = folder / "model"
    shape = {**_SHAPE, "max_context_tokens": MAX_CONTEXT_TOKENS}
    told.write_text(
        json.dumps({"directory": str(model), "words": "ctb_engine:words", "shape": shape, "fake": False}),
        encoding="utf-8",
    )
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    argv = [sys.executable, "-m", "tide_trainer.backends.make_model", "--settings", str(told)]
    run_command(argv, folder / "make_model.log", timeout_s=_MAKE_TIMEOUT_S, env={"PYTHONPATH": path})
    return model


class BenchEngine:
    """One engine with a cache of a given size; belongs to the event loop that starts it.

    Args:
        model: the model's folder.
        kv_tokens: KV cache, a multiple of `BLOCK_TOKENS`.
        num_threads: CPU threads of a forward pass.
        folder: takes logs.
    """

    def __init__(self, model: Path, kv_tokens: int, num_threads: int, folder: Path) -> None:
        self._weights = model / "model.safetensors"
        self._processes = LocalProcesses(folder / "logs")
        settings = VllmSettings(
            str(model),
            kv_tokens=kv_tokens,
            block_tokens=BLOCK_TOKENS,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            num_threads=num_threads,
        )
        self._engine = VllmEngine(RANK, settings, self._processes, folder, ready_timeout_s=_READY_TIMEOUT_S)
        self._version = 0
        self._checksums: dict[str, str] = {}

    async def start(self) -> None:
        """Boots it. Raises EngineFailed."""
        self.info: EngineInfo = await self._engine.start()
        self.client = EngineClient(self.info.url, token=self._engine.token, timeout_s=_CALL_TIMEOUT_S)
        with weights_io.open_tensors(self._weights) as tensors:
            self._checksums = {name: weights_io.checksum(tensor.data) for name, tensor in tensors.items()}

    async def reset(self) -> EngineStats:
        """Drops every cached block, by loading the same weights as a new version; the counters as they then stand."""
        self._version += 1
        await self._engine.update_weights(WeightUpdate(self._version, str(self._weights), self._checksums))
        return await self.client.stats()

    def cpu_s(self) -> float:
        """CPU seconds of the server process so far."""
        return self._processes.cpu_seconds(self._engine.child)

    async def stop(self) -> None:
        """Ends it; safe to repeat."""
        if hasattr(self, "client"):
            await self.client.aclose()
        await self._engine.stop()
        await self._processes.stop_all()
