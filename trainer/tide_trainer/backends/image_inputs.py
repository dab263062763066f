"""Images of the store as a model takes them: patches and their grid, by the model folder's own image processor.

Engines and training ranks use this one path, without the processor's torchvision form, so that both compute with the
same numbers whatever else is installed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tide_trainer.errors import ImageFailed
from tide_trainer.images import ImageStore, ImageTokens, check_spans, decode
from tide_trainer.types import ImageSpan

_MAX_GRIDS = 100_000
"""Images whose sizes are remembered."""


@dataclass(frozen=True, slots=True)
class Patches:
    """One image for the vision tower.

    Attributes:
        grid: (1, rows, columns) of patches.
        num_tokens: placeholder ids that it fills.
        read: makes its patches, or finds them in memory.
    """

    grid: tuple[int, int, int]
    num_tokens: int
    read: Callable[[], Tensor]

    @property
    def pixels(self) -> Tensor:
        """[P, D] float32, P patches in the order of the merged ones.

        Raises:
            ImageFailed: its file is gone.
        """
        return self.read()


class ImageInputs:
    """Reads, decodes and cuts images; thread-safe.

    An image is cut when it is first seen, and again only where its patches are asked for and no longer in memory: in a
    long conversation nearly all images come again each turn, and nearly all are in the engine's prefix cache.

    Args:
        model_dir: the model folder, which has a processor.
        store: the run's images.
        max_cached_bytes: most bytes of patches that stay; 0: none.
    """

    def __init__(self, model_dir: str, store: ImageStore, *, max_cached_bytes: int = 0) -> None:
        from transformers import AutoImageProcessor

        tokens = ImageTokens.read(model_dir)
        if tokens is None:
            raise ValueError(f"{model_dir} takes no images")
        self.tokens = tokens
        self._store = store
        self._processor: Any = AutoImageProcessor.from_pretrained(model_dir, local_files_only=True, backend="pil")
        self._max_cached_bytes = max_cached_bytes
        self._grids: OrderedDict[str, tuple[int, int, int]] = OrderedDict()
        self._cached: OrderedDict[str, Tensor] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    @property
    def patch_values(self) -> int:
        """D: numbers of one patch."""
        processor = self._processor
        return 3 * int(processor.temporal_patch_size) * int(processor.patch_size) ** 2

    def load(self, token_ids: Sequence[int], spans: Sequence[ImageSpan]) -> list[Patches]:
        """The images of one sequence, in order, each as long as its span says.

        Raises:
            ValueError: spans and placeholder ids do not fit, or an image makes another number of tokens than its span.
            ImageRefused: an image cannot be decoded.
            ImageFailed: an image is not in the store.
        """
        check_spans(token_ids, spans, self.tokens.placeholder_id)
        found: list[Patches] = []
        for number, span in enumerate(spans):
            patches = self._patches(span.digest)
            if patches.num_tokens != span.num_tokens:
                raise ValueError(
                    f"image {number} ({span.digest[:12]}) at {span.start} has {span.num_tokens} placeholder ids, and "
                    f"the model's image processor makes {patches.num_tokens} of it"
                )
            found.append(patches)
        return found

    def _patches(self, digest: str) -> Patches:
        with self._lock:
            grid = self._grids.get(digest)
            if grid is None:
                self._cut(digest)
                grid = self._grids[digest]
            elif digest not in self._cached and not self._store.path(digest).is_file():
                raise ImageFailed(f"image {digest} is no longer in {self._store.folder}")
        return Patches(grid, grid[1] * grid[2] // self.tokens.merge_size**2, lambda: self._pixels(digest))

    def _pixels(self, digest: str) -> Tensor:
        with self._lock:
            pixels = self._cached.get(digest)
            if pixels is None:
                return self._cut(digest)
            self._cached.move_to_end(digest)
            return pixels

    def _cut(self, digest: str) -> Tensor:
        with decode(self._store.read(digest)) as image:
            made = self._processor(images=[image], return_tensors="np")
        _, rows, columns = (int(side) for side in made["image_grid_thw"][0])
        pixels = torch.from_numpy(made["pixel_values"])
        self._grids[digest] = (1, rows, columns)
        if len(self._grids) > _MAX_GRIDS:
            self._grids.popitem(last=False)
        self._cached[digest] = pixels
        self._cached_bytes += pixels.nbytes
        while self._cached_bytes > self._max_cached_bytes:
            self._cached_bytes -= self._cached.popitem(last=False)[1].nbytes
        return pixels


def mrope_positions(
    length: int, spans: Sequence[ImageSpan], grids: Sequence[tuple[int, int, int]], merge: int
) -> Tensor:
    """Positions [3, T] in time, row and column: text counts in all three, an image's patches by their place in it.

    Args:
        length: T.
        spans: the sequence's images.
        grids: of each, in patches.
        merge: patches of a merged patch's side.
    """
    positions = torch.empty(3, length, dtype=torch.long)
    here, end = 0, 0
    for span, (_, rows, columns) in zip(spans, grids, strict=True):
        here = _count_on(positions, end, span.start, here)
        end = span.start + span.num_tokens
        rows, columns = rows // merge, columns // merge
        positions[0, span.start : end] = here
        positions[1, span.start : end] = here + torch.arange(rows).repeat_interleave(columns)
        positions[2, span.start : end] = here + torch.arange(columns).repeat(rows)
        here += max(rows, columns)
    _count_on(positions, end, length, here)
    return positions


def _count_on(positions: Tensor, begin: int, end: int, here: int) -> int:
    positions[:, begin:end] = torch.arange(here, here + end - begin)
    return here + end - begin
