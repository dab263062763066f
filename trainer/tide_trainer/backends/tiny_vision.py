"""The tiny model with images: a Qwen2.5-VL of some 0.6 M parameters, and the files of its image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_trainer.backends.tiny_model import TinyModel

PATCH, MERGE, TEMPORAL = 14, 2, 2
MIN_TOKENS, MAX_TOKENS = 4, 64
"""Placeholder ids of the smallest and the largest image."""
_VISION_HEADS, _VISION_DEPTH = 2, 2


def make(shape: TinyModel, tokenizer: Any) -> Any:
    """The model with initial weights from torch's present generator."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    head_dim = shape.hidden // shape.heads
    spread = shape.init_std or shape.hidden**-0.5
    space = head_dim * 3 // 16
    make_config: Any = Qwen2_5_VLConfig
    config = make_config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": shape.hidden,
            "intermediate_size": shape.feed_forward,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": shape.max_context_tokens,
            "initializer_range": spread,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [head_dim // 2 - 2 * space, space, space],
            },
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": _VISION_DEPTH,
            "hidden_size": 32 * _VISION_HEADS,
            "intermediate_size": 128,
            "num_heads": _VISION_HEADS,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL,
            "window_size": 4 * PATCH * MERGE,
            "fullatt_block_indexes": [_VISION_DEPTH - 1],
            "out_hidden_size": shape.hidden,
            "initializer_range": spread,
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=False,
        initializer_range=spread,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def write_processor(folder: Path) -> None:
    """Writes the image processor's settings."""
    side = PATCH * MERGE
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "min_pixels": MIN_TOKENS * side**2,
        "max_pixels": MAX_TOKENS * side**2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1), "utf-8")
