from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tide_trainer import types
from tide_trainer.backends.fake_core import FakeSettings
from tide_trainer.backends.fake_engine import FakeEngine
from tide_trainer.cluster.local import LocalProcesses

VOCABULARY = 40


def write_bigram(path: Path, seed: int, vocabulary: int = VOCABULARY) -> dict[str, str]:
    """Writes a fake engine's model by hand and returns its checksums."""
    rng = random.Random(seed)
    data = struct.pack(f"<{vocabulary * vocabulary}f", *(rng.gauss(0, 2) for _ in range(vocabulary**2)))
    entry = {"dtype": "F32", "shape": [vocabulary, vocabulary], "data_offsets": [0, len(data)]}
    header = json.dumps({"logits": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return {"logits": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def bigram() -> Callable[..., dict[str, str]]:
    return write_bigram


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[LocalProcesses]:
    local = LocalProcesses(tmp_path / "logs")
    yield local
    await local.stop_all()


@pytest.fixture
async def fake_engine(tmp_path: Path, processes: LocalProcesses) -> AsyncIterator[FakeEngine]:
    write_bigram(tmp_path / "v0.safetensors", 0)
    settings = FakeSettings(str(tmp_path / "v0.safetensors"), kv_tokens=4096)
    engine = FakeEngine(types.RankId("local", 0), settings, processes, tmp_path)
    yield engine
    await engine.stop()
