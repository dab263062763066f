"""Images of a run: the folder that holds them, and how many tokens each takes in a model's prompt. No torch.

    bytes -> ImageStore.put -> digest                file `<folder>/<SHA-256>`, shared by router, engines, trainer
    bytes -> image_size -> ImageTokens.count -> placeholder ids in the prompt -> ImageSpan(start, num_tokens, digest)
    check_spans(ids, spans, placeholder)       at every hand-over: router, engine, batch, training rank

One decoder (`decode`) serves engines and training ranks, so that both see the same pixels.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tide_trainer import image_files, model_files
from tide_trainer.errors import ConfigurationError, ImageFailed, ImageRefused
from tide_trainer.types import ImageSpan

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES = 32 * 1024 * 1024
MAX_PIXELS = 64 * 1024 * 1024
"""Width times height of the largest image that is decoded: a small file may name a huge one."""
MAX_ASPECT = 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SUPPORTED = ("qwen2_vl", "qwen2_5_vl")
"""Model types whose image tokens are known."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


class ImageStore:
    """Images by the SHA-256 of their bytes. Any number of processes may read and write one folder.

    Args:
        folder: where the files lie; made by the first `put`.
        max_bytes: largest image.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int = MAX_IMAGE_BYTES) -> None:
        self.folder = Path(folder)
        self._max_bytes = max_bytes

    def put(self, data: bytes) -> str:
        """Keeps an image and returns its digest; the same bytes again only make it young. Blocks on the disk.

        Raises:
            ImageRefused: it is empty or above `max_bytes`.
            ImageFailed: the disk is full or the folder cannot be written; no torn file is left.
        """
        if not 0 < len(data) <= self._max_bytes:
            raise ImageRefused(f"an image of {len(data)} bytes: give 1 to {self._max_bytes} bytes")
        digest = hashlib.sha256(data).hexdigest()
        path = self.folder / digest
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with image_files.locked(self.folder, fcntl.LOCK_SH):
                # A machine that lost power may leave a file of the right name and a wrong length.
                if path.is_file() and path.stat().st_size == len(data):
                    os.utime(path)
                else:
                    image_files.write_whole(path, data)
        except OSError as error:
            fix = "free some space, or give run.directory another disk"
            raise ImageFailed(f"image {digest[:12]} cannot be written to {self.folder} ({error}); {fix}") from error
        return digest

    def path(self, digest: str) -> Path:
        """The file of a digest, whether it exists or not. Raises ImageRefused for what is no digest."""
        return self.folder / checked_digest(digest)

    def read(self, digest: str) -> bytes:
        """An image's bytes, which have this digest.

        Raises:
            ImageRefused: that is no digest.
            ImageFailed: it is not in the store, or what is there is something else.
        """
        path = self.path(digest)
        try:
            with open(path, "rb") as file:
                data = file.read(self._max_bytes + 1)
        except FileNotFoundError as error:
            raise ImageFailed(
                f"image {digest} is not in {self.folder}; put it there before its digest is sent"
            ) from error
        except OSError as error:
            raise ImageFailed(f"image {digest} cannot be read from {self.folder} ({error})") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise ImageFailed(f"{path} does not hold the bytes of its name; remove the file and put the image again")
        return data

    def prune(self, before_s: float, keep: Collection[str]) -> tuple[int, int]:
        """Removes images that were last put before a moment; (how many, their bytes). Blocks on the disk.

        Args:
            before_s: Unix time.
            keep: digests that stay however old they are.

        Raises:
            OSError: the folder cannot be read or written.
        """
        return image_files.prune(self.folder, before_s, keep)


def checked_digest(digest: object) -> str:
    """The digest itself. Raises ImageRefused unless it is 64 lower-case hex digits."""
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise ImageRefused(f"digest: {str(digest)[:80]!r} is no SHA-256 in lower-case hex")
    return digest


def decode(data: bytes) -> Image:
    """The first frame of an image, in RGB, as stored: a rotation in its EXIF data is not applied.

    Raises:
        ImageRefused: it is cut off, too large, or in no format of `FORMATS`.
    """
    from PIL import Image as Pillow

    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageRefused(f"an image of {width} x {height}: give at most {MAX_PIXELS} pixels")
            if image.mode.startswith("I"):
                # 16 bits of grey, of which Pillow would make white wherever it is not nearly black.
                return image.point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Pillow.DecompressionBombError) as error:
        raise ImageRefused(f"an image that cannot be decoded ({error}): give {', '.join(FORMATS)}, whole") from error


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels of an image that `decode` takes; decodes it all, so call it off an event loop.

    Raises:
        ImageRefused: as `decode`.
    """
    with decode(data) as image:
        return image.size


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How a model of the Qwen2-VL family writes an image into its prompt: one placeholder per merged patch.

    Attributes:
        placeholder_id: the id that is repeated; never sampled, never typed by a user.
        placeholder_text: its text, which the chat template writes once per image.
        patch_size: side of a patch in pixels.
        merge_size: patches of a merged patch's side.
        min_pixels: smaller images are enlarged to this.
        max_pixels: larger images are reduced to this.
        forbidden_ids: placeholder ids of all kinds; an engine never samples them.
    """

    placeholder_id: int
    placeholder_text: str
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    forbidden_ids: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        """Placeholder ids that no image exceeds."""
        # Both sides of the largest area are rounded up at worst, at worst in a strip of the longest form.
        area = max(self.max_pixels, self.min_pixels) / self._factor**2
        return math.ceil(area + math.sqrt(area * MAX_ASPECT) + math.sqrt(area / MAX_ASPECT) + 1)

    @property
    def _factor(self) -> int:
        return self.patch_size * self.merge_size

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that the model's image processor makes of an image.

        Raises:
            ImageRefused: one side is over 200 times the other.
        """
        if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
            raise ImageRefused(f"an image of {width} x {height}: one side may be at most {MAX_ASPECT} times the other")
        factor = self._factor
        new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
        if new_width * new_height > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
        elif new_width * new_height < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_width = math.ceil(width * grow / factor) * factor
            new_height = math.ceil(height * grow / factor) * factor
        return new_width, new_height

    def count(self, width: int, height: int) -> int:
        """Placeholder ids of an image of this size in pixels. Raises ImageRefused as `resized`."""
        new_width, new_height = self.resized(width, height)
        return (new_width // self._factor) * (new_height // self._factor)

    @classmethod
    def read(cls, model_dir: str | Path) -> ImageTokens | None:
        """What a model folder's files say; None for a model without images.

        Raises:
            ConfigurationError: it takes images in another way, or a file is missing or wrong.
        """
        folder = Path(model_dir)
        config = model_files.read_json(folder / "config.json")
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            if "vision_config" in config:
                fix = f"{kind!r} takes images in a way that is not built; use a model of {', '.join(SUPPORTED)}"
                raise ConfigurationError("model.path", f"{folder}: {fix}")
            return None
        processor, vision = model_files.image_processor(folder), config.get("vision_config") or {}
        size = processor.get("size") or {}
        try:
            tokens = cls(
                placeholder_id=int(config["image_token_id"]),
                placeholder_text=model_files.token_text(folder, int(config["image_token_id"])),
                patch_size=int(processor.get("patch_size", 14)),
                merge_size=int(processor.get("merge_size", 2)),
                min_pixels=int(processor.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS),
                max_pixels=int(processor.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS),
                forbidden_ids=tuple(int(config[k]) for k in ("image_token_id", "video_token_id") if k in config),
            )
            model = (int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError("model.path", f"{folder}: its image configuration is wrong ({error!r})") from error
        if model != (tokens.patch_size, tokens.merge_size) or not processor.get("do_resize", True):
            fix = "the image processor's patch_size and merge_size must be the model's, and do_resize true"
            raise ConfigurationError("model.path", f"{folder}: {fix}")
        return tokens


def check_spans(token_ids: Sequence[int], spans: Iterable[ImageSpan], placeholder_id: int | None) -> None:
    """Checks that the spans cover exactly the placeholder ids of a sequence, in order and without overlap.

    Args:
        token_ids: [T] ids.
        spans: the images in them.
        placeholder_id: the model's; None for a model without images, where any span is wrong.

    Raises:
        ValueError: names the place.
    """
    end = 0
    for number, span in enumerate(spans):
        where = f"image {number} ({str(span.digest)[:12]}) at {span.start} with {span.num_tokens} tokens"
        if placeholder_id is None:
            raise ValueError(f"{where}: the model takes no images")
        if not _DIGEST.match(span.digest):
            raise ValueError(f"{where}: its digest is no SHA-256 in lower-case hex")
        if span.num_tokens < 1 or span.start < end:
            raise ValueError(f"{where}: it is empty, or begins before {end}, the end of the one before")
        _check_no_placeholder(token_ids, end, span.start, placeholder_id)
        end = span.start + span.num_tokens
        found = token_ids[span.start : end].count(placeholder_id)
        if found != span.num_tokens:
            raise ValueError(f"{where}: {found} placeholder ids stand there, of {len(token_ids)} ids in all")
    if placeholder_id is not None:
        _check_no_placeholder(token_ids, end, len(token_ids), placeholder_id)


def _check_no_placeholder(token_ids: Sequence[int], begin: int, end: int, placeholder_id: int) -> None:
    between = token_ids[begin:end]
    if placeholder_id in between:
        place = begin + between.index(placeholder_id)
        raise ValueError(f"a placeholder id at {place} belongs to no image")
