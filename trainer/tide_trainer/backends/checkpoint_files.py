"""The tensors of published versions and checkpoints, with torch. The files' rules are in `whole_files`.

In `trainer_state.tensors`: `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, `rng.RANK`, `cuda_rng.RANK`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tide_trainer.backends import whole_files


def publish(directory: str, version: int, tensors: Mapping[str, torch.Tensor]) -> tuple[str, dict[str, str]]:
    """Writes a version's file.

    Returns:
        The path, and for each tensor the SHA-256 (hex) of its little-endian contiguous bytes.
    """
    with whole_files.published(directory, version) as (part, path):
        save_file(dict(tensors), part, metadata={"format": "pt", "version": str(version)})
    return str(path), {name: checksum(tensor) for name, tensor in tensors.items()}


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of a CPU tensor's little-endian contiguous bytes."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def save(
    directory: str,
    source: str,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    place: Mapping[str, Any],
    extra: Mapping[str, str],
) -> None:
    """Writes a checkpoint of weights and state; see `whole_files.checkpoint`."""
    with whole_files.checkpoint(directory, source, place, extra) as folder:
        save_file(dict(tensors), folder / whole_files.WEIGHTS, metadata={"format": "pt"})
        save_file(dict(state), folder / whole_files.STATE_TENSORS)


def load_state(
    directory: str, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, rank: int
) -> tuple[int, str]:
    """Puts back the optimizer and the generators; returns the version and the last objective.

    A plain model folder has none of them: version 0, no objective.
    """
    place = whole_files.saved_place(directory)
    if place is None:
        return 0, ""
    state = load_file(Path(directory) / whole_files.STATE_TENSORS)
    for name, parameter in parameters.items():
        moments = {key: state[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step") if f"{key}.{name}" in state}
        if moments:
            optimizer.state[parameter] = {key: _like(value, parameter, key) for key, value in moments.items()}
    if f"rng.{rank}" in state:
        torch.set_rng_state(state[f"rng.{rank}"])
    if f"cuda_rng.{rank}" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[f"cuda_rng.{rank}"])
    return int(place["version"]), str(place["objective"])


def _like(value: torch.Tensor, parameter: Any, key: str) -> torch.Tensor:
    """A moment on the parameter's device, sharded as the parameter is; the step count is a scalar of its own."""
    if key == "step":
        return value.to(parameter.device) if parameter.is_cuda else value
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
