"""Small pictures of random pixels, and prompts of the tiny model with images."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model
from tide_trainer.images import ImageStore, ImageTokens
from tide_trainer.types import ImageSpan

WORDS = [f"w{number}" for number in range(20)]
USER, ASSISTANT, VISION_START, VISION_END = 4, 5, 7, 8
FIRST_WORD = 11


def picture(seed: int, width: int = 100, height: int = 80) -> bytes:
    """A PNG whose pixels are made from a seed."""
    pixels = random.Random(seed).randbytes(3 * width * height)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG")
    return file.getvalue()


def vision_model(folder: Path, seed: int = 0) -> Path:
    """The tiny model that takes images."""
    return make_tiny_model(folder, WORDS, TinyModel(seed=seed, hidden=64, heads=2, kv_heads=1, vision=True))


def prompt_with(
    store: ImageStore, tokens: ImageTokens, images: Sequence[bytes], num_words: int = 3, seed: int = 0
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """A user's message: words, an image, words, an image, ..., words; the ids end where the assistant would begin."""
    source = random.Random(seed)

    def words() -> list[int]:
        return [FIRST_WORD + source.randrange(len(WORDS)) for _ in range(num_words)]

    ids, spans = [USER, *words()], []
    for image in images:
        with Image.open(io.BytesIO(image)) as opened:
            count = tokens.count(*opened.size)
        ids.append(VISION_START)
        spans.append(ImageSpan(len(ids), count, store.put(image)))
        ids += [tokens.placeholder_id] * count + [VISION_END, *words()]
    return [*ids, ASSISTANT], tuple(spans)
