from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import shutil
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tide_trainer import types
from tide_trainer.backends import weights_io
from tide_trainer.backends.engine_process import EngineProcess
from tide_trainer.backends.fake_core import FakeSettings
from tide_trainer.backends.fake_engine import FakeEngine
from tide_trainer.backends.vllm_engine import VllmEngine
from tide_trainer.backends.vllm_settings import VllmSettings
from tide_trainer.cluster.local import LocalProcesses

VOCABULARY = 200
KV_TOKENS = 4096
MAX_CONTEXT_TOKENS = 1024


def write_tensors(path: Path, tensors: dict[str, tuple[list[int], bytes]]) -> dict[str, str]:
    """Writes float32 tensors as a safetensors file, by hand, and returns their checksums."""
    header: dict[str, Any] = {}
    data = b""
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return {name: hashlib.sha256(values).hexdigest() for name, (_, values) in tensors.items()}


def write_bigram(path: Path, seed: int, vocabulary: int = VOCABULARY) -> dict[str, str]:
    """Writes a fake engine's model and returns its checksums."""
    rng = random.Random(seed)
    values = struct.pack(f"<{vocabulary**2}f", *(rng.gauss(0, 2) for _ in range(vocabulary**2)))
    return write_tensors(path, {"logits": ([vocabulary, vocabulary], values)})


def checksums_of(path: str | Path) -> dict[str, str]:
    with weights_io.open_tensors(path) as tensors:
        return {name: weights_io.checksum(tensor.data) for name, tensor in tensors.items()}


def write_qwen(folder: Path, seed: int) -> Path:
    """Makes a tiny Qwen3 whose next token depends on the whole prompt; returns its weights file."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        initializer_range=0.12,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    return folder / "model.safetensors"


@dataclass
class EngineCase:
    """A started engine, the models that it can be given, and what each of them would say."""

    engine: EngineProcess
    info: types.EngineInfo
    files: list[Path]
    reference: Callable[[int, Sequence[int], int], float]
    version: int = 0
    model: int = 0
    checksums: dict[int, dict[str, str]] = field(default_factory=dict)

    def update(self, model: int) -> types.WeightUpdate:
        """The next version, holding the weights of `model`."""
        if model not in self.checksums:
            self.checksums[model] = checksums_of(self.files[model])
        return types.WeightUpdate(self.version + 1, str(self.files[model]), self.checksums[model])

    async def publish(self, model: int) -> types.WeightReceipt:
        receipt = await self.engine.update_weights(self.update(model))
        self.version, self.model = receipt.version, model
        return receipt

    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """What the present model gives to each of `token_ids`, by an independent computation."""
        ids = [*prompt_ids, *token_ids]
        return [self.reference(self.model, ids[:end], ids[end]) for end in range(len(prompt_ids), len(ids))]

    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(max(range(VOCABULARY), key=lambda token: self.reference(self.model, ids, token)))
        return ids[len(prompt_ids) :]

    def client(self, token: str | None = None) -> Any:
        from tide_trainer.engine_client import EngineClient

        return EngineClient(self.info.url, token=token or self.engine.token, timeout_s=60.0)


def bigram_reference(files: list[Path]) -> Callable[..., float]:
    rows: dict[tuple[int, int], list[float]] = {}

    def logprob(model: int, prompt_ids: Sequence[int], token_id: int) -> float:
        key = (model, prompt_ids[-1])
        if key not in rows:
            with weights_io.open_tensors(files[model]) as tensors:
                begin = prompt_ids[-1] * VOCABULARY * 4
                logits = struct.unpack(f"<{VOCABULARY}f", tensors["logits"].data[begin : begin + VOCABULARY * 4])
            total = math.log(sum(math.exp(value) for value in logits))
            rows[key] = [value - total for value in logits]
        return rows[key][token_id]

    return logprob


def qwen_reference(files: list[Path]) -> Callable[..., float]:
    import torch
    from transformers import Qwen3ForCausalLM

    models = [Qwen3ForCausalLM.from_pretrained(file.parent).eval() for file in files]
    known: dict[tuple[int, tuple[int, ...]], list[float]] = {}

    def logprob(model: int, prompt_ids: Sequence[int], token_id: int) -> float:
        key = (model, tuple(prompt_ids))
        if key not in known:
            with torch.no_grad():
                logits = models[model](torch.tensor([list(prompt_ids)])).logits[0, -1].double()
            known[key] = torch.log_softmax(logits, -1).tolist()
        return known[key][token_id]

    return logprob


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def session_processes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProcesses]:
    local = LocalProcesses(tmp_path_factory.mktemp("logs"))
    yield local
    await local.stop_all()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fake_case(tmp_path_factory, session_processes) -> AsyncIterator[EngineCase]:
    folder = tmp_path_factory.mktemp("fake")
    files = [folder / f"m{seed}.safetensors" for seed in range(2)]
    for seed, file in enumerate(files):
        write_bigram(file, seed)
    settings = FakeSettings(
        str(files[0]), kv_tokens=KV_TOKENS, max_context_tokens=MAX_CONTEXT_TOKENS, token_latency_s=0.001
    )
    engine = FakeEngine(types.RankId("fake", 0), settings, session_processes, folder)
    yield EngineCase(engine, await engine.start(), files, bigram_reference(files))
    await engine.stop()


@pytest.fixture(scope="session")
def qwen_files(tmp_path_factory) -> list[Path]:
    return [write_qwen(tmp_path_factory.mktemp(f"qwen{seed}"), seed) for seed in range(2)]


def vllm_settings(file: Path) -> VllmSettings:
    return VllmSettings(str(file.parent), kv_tokens=KV_TOKENS, max_context_tokens=MAX_CONTEXT_TOKENS, max_running=32)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_case(tmp_path_factory, session_processes, qwen_files) -> AsyncIterator[EngineCase]:
    folder = tmp_path_factory.mktemp("vllm")
    engine = VllmEngine(types.RankId("vllm", 0), vllm_settings(qwen_files[0]), session_processes, folder)
    yield EngineCase(engine, await engine.start(), qwen_files, qwen_reference(qwen_files))
    await engine.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fresh_vllm(tmp_path_factory, session_processes, qwen_files) -> AsyncIterator[EngineProcess]:
    """The second and last boot: a new process on the second model's folder. Tests may kill it."""
    folder = tmp_path_factory.mktemp("fresh")
    shutil.copytree(qwen_files[1].parent, folder / "model")
    engine = VllmEngine(types.RankId("vllm", 1), vllm_settings(folder / "model" / "x"), session_processes, folder)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(params=["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def case(request: pytest.FixtureRequest) -> EngineCase:
    return request.getfixturevalue(f"{request.param}_case")


async def until(condition: Callable[[], Any], limit_s: float = 20.0) -> None:
    """Waits for an asynchronous condition; fails when it does not come true."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 - the condition is another process's
            await asyncio.sleep(0.01)


async def until_running(engine: EngineProcess) -> None:
    """Waits until a call is in the engine's batch."""

    async def running() -> bool:
        return (await engine.stats()).num_running > 0

    await until(running)


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return until


@pytest.fixture
def runs() -> Callable[..., Any]:
    return until_running


@pytest.fixture
def tensor_writer() -> Callable[..., dict[str, str]]:
    return write_tensors


@pytest.fixture
def bigram_writer() -> Callable[..., dict[str, str]]:
    return write_bigram
