"""The tokenizer, template and image settings of a small model that takes images, without weights; screenshots."""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tide_sdk.images import ImageRef, digest_of

PLACEHOLDER = "<|image_pad|>"
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    PLACEHOLDER,
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE = 28
"""Pixels of a side of what becomes one token."""
MAX_TOKENS = 64


def make_vision_chat(folder: Path) -> Path:
    """Write the folder."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["click left right user assistant seen"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
    files: dict[str, Any] = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
        "config.json": {
            "model_type": "qwen2_5_vl",
            "eos_token_id": ids["<|im_end|>"],
            "image_token_id": ids[PLACEHOLDER],
            "video_token_id": ids["<|video_pad|>"],
            "vision_config": {"patch_size": SIDE // 2, "spatial_merge_size": 2},
        },
        "preprocessor_config.json": {
            "patch_size": SIDE // 2,
            "merge_size": 2,
            "min_pixels": 4 * SIDE**2,
            "max_pixels": MAX_TOKENS * SIDE**2,
        },
    }
    for name, data in files.items():
        (folder / name).write_text(json.dumps(data))
    return folder


def screenshot(seed: int, width: int = 100, height: int = 80, *, noisy_rows: int = 0) -> bytes:
    """A PNG drawn from a seed: some boxes and a number; each pixel of the noisy rows below takes 3 bytes."""
    source = random.Random(seed)
    picture = Image.new("RGB", (width, height), (source.randrange(256), 60, 60))
    draw = ImageDraw.Draw(picture)
    for _ in range(8):
        left, top = source.randrange(width), source.randrange(height)
        draw.rectangle((left, top, left + width // 4, top + height // 4), fill=(0, source.randrange(256), 90))
    draw.text((2, 2), str(seed), fill=(255, 255, 255))
    if noisy_rows:
        noise = Image.frombytes("RGB", (width, noisy_rows), source.randbytes(3 * width * noisy_rows))
        picture.paste(noise, (0, height - noisy_rows))
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def bomb() -> bytes:
    """A PNG that says it has 60,000 x 60,000 pixels."""
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))


def seen(data: bytes, words: str = "look") -> dict[str, Any]:
    """An observation that refers to an image."""
    url = ImageRef(digest_of(data), "image/png").url
    return {
        "role": "user",
        "content": [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": url}}],
    }


def said(words: str = "click") -> dict[str, Any]:
    return {"role": "assistant", "content": words}
