"""Files of the weights: published versions and checkpoints, each whole or absent, all safetensors and JSON.

A checkpoint is a Hugging Face model folder with three files more:

    trainer_state.json          format, version, steps of the optimizer
    trainer_state.safetensors   `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, `rng.RANK`
    extra.json                  what the caller of `save` gave
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FORMAT = 1
STATE_JSON, STATE_TENSORS, EXTRA_JSON = "trainer_state.json", "trainer_state.safetensors", "extra.json"
WEIGHTS = "model.safetensors"
PREVIOUS = ".previous"
_OWN = {STATE_JSON, STATE_TENSORS, EXTRA_JSON}
_NUM_KEPT = 2


def publish(directory: str, version: int, tensors: Mapping[str, torch.Tensor]) -> tuple[str, dict[str, str]]:
    """Writes `vVERSION.safetensors`; versions before the last two are removed.

    Returns:
        The path, and for each tensor the SHA-256 (hex) of its little-endian contiguous bytes.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"v{version:08d}.safetensors"
    part = folder / f".{path.name}.part"
    save_file(dict(tensors), part, metadata={"format": "pt", "version": str(version)})
    part.replace(path)
    older = sorted(other for other in folder.glob("v*.safetensors") if other.name < path.name)
    for stale in older[: len(older) - (_NUM_KEPT - 1)]:
        stale.unlink(missing_ok=True)
    return str(path), {name: checksum(tensor) for name, tensor in tensors.items()}


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of a CPU tensor's little-endian contiguous bytes."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def save(
    directory: str,
    source: str,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    version: int,
    extra: Mapping[str, str],
) -> None:
    """Writes a checkpoint beside `directory`, then renames; the one before stays as `directory.previous`.

    A crash at any point leaves `directory` or `directory.previous` whole; `FsdpBackend.start` finds it.

    Args:
        directory: the checkpoint's folder.
        source: the folder whose configuration and tokenizer files are copied.
        tensors: the weights.
        state: optimizer moments and generator states.
        version: the model version.
        extra: kept in `extra.json`.
    """
    final = Path(directory)
    part, previous = final.with_name(f".{final.name}.part"), final.with_name(final.name + PREVIOUS)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in sorted(Path(source).iterdir()):
        weights = file.suffix in {".safetensors", ".bin", ".pt"} or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in _OWN:
            shutil.copyfile(file, part / file.name)
    save_file(dict(tensors), part / WEIGHTS, metadata={"format": "pt"})
    save_file(dict(state), part / STATE_TENSORS)
    (part / EXTRA_JSON).write_text(json.dumps(dict(extra), indent=1), "utf-8")
    (part / STATE_JSON).write_text(json.dumps({"format": FORMAT, "version": version}), "utf-8")
    for file in part.iterdir():
        _sync(file)
    _sync(part)
    if final.exists():
        shutil.rmtree(previous, ignore_errors=True)
        final.rename(previous)
    part.rename(final)
    _sync(final.parent)


def load_state(
    directory: str, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, rank: int
) -> int:
    """Puts back the optimizer and the generators; returns the version. A plain model folder has neither: version 0."""
    path = Path(directory) / STATE_JSON
    if not path.is_file():
        return 0
    found = json.loads(path.read_text("utf-8"))
    if found.get("format") != FORMAT:
        raise ValueError(f"{path}: format {found.get('format')!r} is not {FORMAT}: saved by another release")
    state = load_file(Path(directory) / STATE_TENSORS)
    for name, parameter in parameters.items():
        moments = {key: state[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step") if f"{key}.{name}" in state}
        if moments:
            optimizer.state[parameter] = {key: _like(value, parameter, key) for key, value in moments.items()}
    if f"rng.{rank}" in state:
        torch.set_rng_state(state[f"rng.{rank}"])
    if f"cuda_rng.{rank}" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[f"cuda_rng.{rank}"])
    return int(found["version"])


def _like(value: torch.Tensor, parameter: Any, key: str) -> torch.Tensor:
    """A moment on the parameter's device, sharded as the parameter is; the step count is a scalar of its own."""
    if key == "step":
        return value.to(parameter.device) if parameter.is_cuda else value
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
