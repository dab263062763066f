"""A causal language model that answers with log-probs of chosen positions, sharded over ranks where there are several.

Sequences are padded at their right ends. Attention is causal, so no position sees what lies to its right: padding needs
no mask, and its value, the eos id included, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tide_trainer.backends.vision_batch import VisionBatch
from tide_trainer.images import SUPPORTED, ImageTokens

_PLAIN_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3", *SUPPORTED})
"""Model types whose logits are exactly lm_head(hidden): no scaling, no soft cap."""


class PolicyModel(nn.Module):
    """Wraps a transformers model; logits are made only where they are used.

    Args:
        inner: an `AutoModelForCausalLM`, or an `AutoModelForImageTextToText` of a family whose images are known.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self._head_alone = inner.config.model_type in _PLAIN_HEADS

    def forward(self, ids: Tensor, rows: Tensor, columns: Tensor, vision: VisionBatch | None = None) -> Tensor:
        """Logits [N, V] float32 that predict the token at (rows[n], columns[n]) of `ids` [B, T], columns at least 1.

        `vision` holds the images where there are any.
        """
        if self._head_alone:
            if vision is not None:
                inputs = {"inputs_embeds": vision.embed(self.inner, ids), "position_ids": vision.positions}
            else:
                inputs = {"input_ids": ids}
            hidden = text_model(self.inner)(**inputs, use_cache=False).last_hidden_state
            return self.inner.lm_head(hidden[rows, columns - 1]).float()
        return self.inner(input_ids=ids, use_cache=False).logits[rows, columns - 1].float()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name -> tensor, tied weights once; sharded tensors are still sharded."""
        yield from self.inner.named_parameters()
        persistent = self.inner.state_dict().keys()
        for name, tensor in self.inner.named_buffers():
            if name in persistent:
                yield name, tensor


def load_policy(folder: str, device: torch.device) -> PolicyModel:
    """Loads a model folder in float32; never from the network."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = AutoModelForCausalLM if ImageTokens.read(folder) is None else AutoModelForImageTextToText
    inner = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    inner.train()
    return PolicyModel(inner.to(device))


def shard(model: PolicyModel, mesh: Any, dtype: torch.dtype) -> None:
    """Shards parameters, gradients and optimizer state over the ranks of a mesh (FSDP2), one unit per layer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    vision_blocks = model.inner.model.visual.blocks if hasattr(model.inner.model, "visual") else ()
    for layer in (*text_model(model.inner).layers, *vision_blocks):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # By default the root keeps its gathered weights after a forward: after `score`, which has no backward, they would
    # outlive the next update and be published.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def text_model(inner: Any) -> Any:
    """The decoder without its head; a model with images holds it beside the vision tower."""
    return getattr(inner.model, "language_model", inner.model)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, without gradient; all ranks call it together."""
    tensor = tensor.detach()
    if not hasattr(tensor, "full_tensor"):
        return tensor
    # The gathered tensor may still be under way; a copy of its bytes waits for it and is an ordinary tensor.
    return tensor.full_tensor().clone(memory_format=torch.contiguous_format)  # type: ignore[operator]


class Padded:
    """Sequences of one micro-batch as tensors; an empty one is a single row in which nothing trains.

    Attributes:
        ids: [B, T] token ids, zeros at the right ends.
        rows: [N] row of each chosen position.
        columns: [N] column of each chosen position.
        targets: [N] the id there.
        shape: (B, T).
    """

    def __init__(self, sequences: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        width = max((len(sequence["ids"]) for sequence in sequences), default=0)
        self.shape = (max(len(sequences), 1), max(width, 2))
        ids = torch.zeros(self.shape, dtype=torch.long)
        rows: list[int] = []
        columns: list[int] = []
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence["ids"])] = torch.tensor(sequence["ids"], dtype=torch.long)
            rows += [row] * len(sequence["trained"])
            columns += sequence["trained"]
        self.rows = torch.tensor(rows, dtype=torch.long, device=device)
        self.columns = torch.tensor(columns, dtype=torch.long, device=device)
        self.ids = ids.to(device)
        self.targets = self.ids[self.rows, self.columns]

    def spread(self, values: Tensor) -> Tensor:
        """[N] values at their places in a matrix [B, T] of zeros."""
        matrix = torch.zeros(self.shape, dtype=values.dtype, device=values.device)
        return matrix.index_put((self.rows, self.columns), values)

    def gather(self, sequences: Sequence[Mapping[str, Any]], name: str) -> Tensor:
        """[B, T] the sequences' lists of values at chosen positions, for example `logprobs`."""
        values = [value for sequence in sequences for value in sequence[name]]
        return self.spread(torch.tensor(values, dtype=torch.float32, device=self.ids.device))


def log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob [N] of each target, and all log-probs [N, V]."""
    every = torch.log_softmax(logits, dim=-1)
    return every.gather(-1, targets[:, None])[:, 0], every


def entropy(every: Tensor) -> Tensor:
    """Entropy [N] of distributions given as log-probs [N, V]."""
    return -(every.exp() * every).sum(-1)
