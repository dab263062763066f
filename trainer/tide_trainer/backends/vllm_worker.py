"""Weights into a live vLLM model and back out of it: the worker extension, and the switch that makes it safe.

On CPU vLLM packs linear weights when it loads them and computes with the packed copy: a later load then reports
success and changes nothing. `disable_prepacking` must run before the engine is built.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from tide_trainer.backends import vllm_kernels, weights_io
from tide_trainer.errors import WeightsDiffer

_LOG = logging.getLogger(__name__)


def disable_prepacking() -> None:
    """Makes vLLM's CPU kernels compute with the parameters themselves. Idempotent; needless but harmless on GPU."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    for module, name, value in (
        (_custom_ops, "_supports_onednn", False),
        (utils, "check_cpu_sgl_kernel", lambda *_args, **_kwargs: False),
    ):
        if not hasattr(module, name):
            _LOG.warning("%s has no %s any more: trust weight updates only if the tests pass", module.__name__, name)
        setattr(module, name, value)


@dataclass(frozen=True, slots=True)
class LivePart:
    """Where one tensor of the file lives in the model: rows of a parameter, which may hold several tensors.

    Attributes:
        parameter: the live parameter.
        begin: first row.
        num_rows: rows; 0-dimensional tensors have one.
    """

    parameter: torch.Tensor
    begin: int
    num_rows: int

    @property
    def tensor(self) -> torch.Tensor:
        """The live rows."""
        return self.parameter[self.begin : self.begin + self.num_rows] if self.parameter.ndim else self.parameter


class WeightLoader:
    """Mixed into vLLM's worker (`worker_extension_cls`); one worker holds the whole model."""

    def tide_load_weights(self, path: str, checksums: Mapping[str, str]) -> int:
        """Loads a safetensors file into the live model and reads every tensor back.

        The proof: each tensor's rows are cut out of the live (fused) parameters, and their bytes have the announced
        SHA-256. Where the model's element type is not the file's, the file's bytes have it, and the live rows equal
        the file's tensor cast to the model's type.

        Returns:
            The number of tensors.

        Raises:
            WeightsDiffer: nothing was loaded (names, shapes), or what was loaded is not what was announced.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        with weights_io.open_tensors(path) as raw:
            weights_io.check_names(raw, checksums, "the file")
            parts = locate(model, {name: tensor.shape for name, tensor in raw.items()})
        try:
            with torch.no_grad():
                model.load_weights(_tensors(path))
        except Exception as error:
            raise WeightsDiffer(f"vLLM could not load {path}: {type(error).__name__}: {error}") from error
        differing = [name for name, tensor in _tensors(path) if not _holds(parts[name].tensor, tensor, checksums[name])]
        if differing:
            raise WeightsDiffer(f"the live model does not hold the announced bytes of {', '.join(differing[:5])}")
        vllm_kernels.bind(model)
        return len(parts)

    def tide_num_encoded_images(self) -> int:
        """Images of which the vision tower's output is kept."""
        kept = getattr(self.model_runner, "encoder_cache", None)  # type: ignore[attr-defined]
        # vLLM's second model runner has an object around the dictionary.
        return len(getattr(kept, "encoder_outputs", kept) or ())

    def tide_bind_kernels(self) -> int:
        """Gives the loaded model its kernels (`vllm_kernels.bind`); the number bound."""
        return vllm_kernels.bind(self.model_runner.get_model())  # type: ignore[attr-defined]


def locate(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LivePart]:
    """Finds the place of every tensor of a file, and that the file fills every parameter of the model.

    Args:
        model: vLLM's model.
        shapes: Hugging Face tensor name -> sizes.

    Raises:
        WeightsDiffer: names the tensors that are missing, unknown or of a wrong shape.
    """
    # A model with images may leave the fused layers of its decoder to the decoder's own table.
    packed: dict[str, list[str]] = {}
    for owner in (getattr(model, "language_model", None), model):
        packed |= getattr(owner, "packed_modules_mapping", {})
    # A model with images keeps its parts under other names than the file; its loader renames by the same table.
    prefixes = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_prefix", {})
    file_names = {_renamed(name, prefixes): name for name in shapes}
    shapes = {renamed: shapes[name] for renamed, name in file_names.items()}
    parts: dict[str, LivePart] = {}
    missing: list[str] = []
    seen: dict[int, str] = {}
    for live_name, parameter in model.named_parameters(remove_duplicate=False):
        names = _file_names(live_name, packed)
        tied_to = seen.setdefault(parameter.data_ptr(), live_name)
        if tied_to != live_name and not any(name in shapes for name in names):
            continue  # the file holds a tied tensor once
        absent = [name for name in names if name not in shapes]
        if absent:
            missing += absent
            continue
        _place(parts, model, live_name, parameter, {name: shapes[name] for name in names})
    unknown = sorted(shapes.keys() - parts.keys())
    if missing or unknown:
        raise WeightsDiffer(
            f"the file lacks {', '.join(missing[:5]) or 'nothing'} and the model does not know "
            f"{', '.join(unknown[:5]) or 'nothing else'}"
        )
    return {file_names[renamed]: part for renamed, part in parts.items()}


def _renamed(name: str, prefixes: Mapping[str, str | None]) -> str:
    for prefix, new in prefixes.items():
        if new is not None and name.startswith(prefix):
            name = new + name.removeprefix(prefix)
    return name


def _file_names(live_name: str, packed: Mapping[str, list[str]]) -> list[str]:
    path = live_name.split(".")
    for position, module in enumerate(path):
        if module in packed:
            return [".".join([*path[:position], part, *path[position + 1 :]]) for part in packed[module]]
    return [live_name]


def _place(
    parts: dict[str, LivePart],
    model: Any,
    live_name: str,
    parameter: torch.Tensor,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    begin = 0
    for name, shape in shapes.items():
        num_rows = shape[0] if shape else 1
        if tuple(parameter.shape[1:]) != shape[1:] or len(shape) != parameter.ndim:
            raise WeightsDiffer(f"{name} has shape {list(shape)}; the live {live_name} is {list(parameter.shape)}")
        parts[name] = LivePart(parameter, begin, num_rows)
        begin += num_rows
    # Embeddings are padded to a multiple of 64 rows; the padding is never sampled.
    module = model.get_submodule(live_name.rpartition(".")[0])
    wanted = getattr(module, "org_vocab_size", parameter.shape[0] if parameter.ndim else 1)
    if begin != wanted:
        raise WeightsDiffer(f"{', '.join(shapes)} have {begin} rows together; the live {live_name} has {wanted}")


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def _holds(live: torch.Tensor, sent: torch.Tensor, digest: str) -> bool:
    if live.dtype == sent.dtype:
        return _digest(live) == digest
    return _digest(sent) == digest and torch.equal(live.cpu(), sent.to(live.dtype))


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
