"""The images of one micro-batch for a training rank: read when the micro-batch is computed, and forgotten after it.

Their patches are bounded as the micro-batch is: an image's placeholder ids count as its tokens, and each stands for
`merge_size ** 2` patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tide_trainer.backends.image_inputs import ImageInputs, Patches, mrope_positions
from tide_trainer.types import ImageSpan


@dataclass(frozen=True, slots=True)
class VisionBatch:
    """What the model needs beside the ids [B, T].

    Attributes:
        positions: [3, B, T] in time, row and column.
        pixels: [P, D] patches of all different images.
        grids: [I, 3] their grids in patches.
        rows: [N] row of each placeholder id.
        columns: [N] column of each placeholder id.
        sources: [N] the vision tower's output that belongs there, by its index.
    """

    positions: Tensor
    pixels: Tensor
    grids: Tensor
    rows: Tensor
    columns: Tensor
    sources: Tensor

    def embed(self, inner: Any, ids: Tensor) -> Tensor:
        """Embeddings [B, T, H] of the ids, with the vision tower's outputs in the place of placeholders."""
        embeddings = inner.model.language_model.embed_tokens(ids)
        seen = inner.model.get_image_features(self.pixels, self.grids).pooler_output
        features = torch.cat(list(seen)).to(embeddings.dtype)
        if not len(self.rows):
            return embeddings + 0.0 * features.sum()
        return embeddings.index_put((self.rows, self.columns), features[self.sources])


def vision_batch(
    sequences: Sequence[Mapping[str, Any]], shape: tuple[int, int], inputs: ImageInputs, device: torch.device
) -> VisionBatch:
    """The images of a micro-batch's sequences, as `training_wire.pack` made them.

    A micro-batch without images gets one blank image that no id takes: each rank must enter the tower where one does,
    for the tower's weights are spread over all.

    Raises:
        ValueError, ImageRefused, ImageFailed: as `ImageInputs.load`; nothing was computed.
    """
    merge = inputs.tokens.merge_size
    positions = torch.arange(shape[1]).expand(3, *shape).clone()
    unique: dict[str, int] = {}
    seen: list[tuple[Patches, Tensor]] = []
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    sources: list[Tensor] = []
    total = 0
    for row, sequence in enumerate(sequences):
        spans = [ImageSpan(*entry) for entry in sequence.get("images", ())]
        images = inputs.load(sequence["ids"], spans)
        for span, patches in zip(spans, images, strict=True):
            if span.digest not in unique:
                unique[span.digest] = total
                # Now, while they are still in memory.
                seen.append((patches, patches.pixels))
                total += patches.num_tokens
            rows.append(torch.full((span.num_tokens,), row))
            columns.append(torch.arange(span.start, span.start + span.num_tokens))
            sources.append(unique[span.digest] + torch.arange(span.num_tokens))
        length = len(sequence["ids"])
        positions[:, row, :length] = mrope_positions(length, spans, [image.grid for image in images], merge)
    grids = [patches.grid for patches, _ in seen] or [(1, merge, merge)]
    blank = torch.zeros(0 if seen else merge**2, inputs.patch_values)
    return VisionBatch(
        positions.to(device),
        torch.cat([*(pixels for _, pixels in seen), blank]).to(device),
        torch.tensor(grids, device=device),
        _joined(rows).to(device),
        _joined(columns).to(device),
        _joined(sources).to(device),
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
