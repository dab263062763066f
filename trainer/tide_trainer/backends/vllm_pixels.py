"""An image's patches as vLLM takes them; imports vLLM, so `vllm_images.register` goes first."""

from __future__ import annotations

from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalFieldElem, MultiModalKwargsItem

from tide_trainer.backends.image_inputs import Patches


class Pixels(MultiModalFieldElem):
    """Patches that are read when the vision tower runs: an image in the prefix cache is never read again.

    Args:
        patches: of the image.
    """

    def __init__(self, patches: Patches) -> None:
        _, rows, columns = patches.grid
        self.field = MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([rows * columns])).field
        self._patches = patches
        self._held: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """[P, D] patches."""
        return self._patches.pixels if self._held is None else self._held

    def hold(self) -> None:
        """Read the patches now, so that `data` cannot fail until `release`. Raises ImageRefused, ImageFailed."""
        if self._held is None:
            self._held = self._patches.pixels

    def release(self) -> None:
        """Let go of them."""
        self._held = None


def item(patches: Patches) -> Any:
    """An image of a prompt."""
    grid = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    return MultiModalKwargsItem(
        {
            "pixel_values": Pixels(patches),
            "image_grid_thw": MultiModalFieldElem(torch.tensor(patches.grid), grid.field),
        }
    )
