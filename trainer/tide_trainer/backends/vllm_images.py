"""Images into vLLM's engine core without vLLM's own image processing.

vLLM would collapse and expand placeholders itself, and needs the whole processor of the model for it (torchvision, a
tokenizer, video). Here the prompt's ids go in as they were sent, with patches made by `image_inputs` as the training
ranks make them: what the engine computes on is what is trained on.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tide_trainer.backends.image_inputs import ImageInputs, Patches
from tide_trainer.errors import EngineRefused, ImageFailed, ImageRefused
from tide_trainer.images import ImageStore, ImageTokens, check_spans
from tide_trainer.types import ImageSpan

_MODULES = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
}


class PromptImages:
    """The images of prompts, read from the run's store. Belongs to one event loop.

    Args:
        model_dir: the model folder.
        image_folder: the run's image store; empty: images are refused.
        max_cached_bytes: most bytes of patches that stay in memory.
    """

    def __init__(self, model_dir: str, image_folder: str, max_cached_bytes: int) -> None:
        self.tokens = ImageTokens.read(model_dir)
        taken = image_folder and self.tokens is not None
        store = ImageStore(image_folder)
        self._inputs = ImageInputs(model_dir, store, max_cached_bytes=max_cached_bytes) if taken else None

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """Placeholder ids, which are never sampled."""
        return self.tokens.forbidden_ids if self.tokens else ()

    async def features(self, prompt_ids: Sequence[int], spans: Sequence[ImageSpan]) -> list[Any] | None:
        """vLLM's `mm_features` of a prompt; None without images.

        Raises:
            EngineRefused: a span does not fit the ids or its image, or its image cannot be read.
        """
        try:
            if not spans:
                check_spans(prompt_ids, (), self.tokens.placeholder_id if self.tokens else None)
                return None
            if self._inputs is None:
                raise ValueError("the model takes none, or the engine was given no image store")
            return features(spans, await asyncio.to_thread(self._inputs.load, prompt_ids, spans))
        except (ValueError, ImageRefused, ImageFailed) as error:
            raise EngineRefused(f"images: {error}", reason="invalid") from error


def register(model_dir: str, tokens: ImageTokens) -> None:
    """Makes vLLM's model class of a folder work without its processor; to be called before the engine's configuration.

    Args:
        model_dir: a folder of the Qwen2-VL family.
        tokens: what an image takes in its prompts.
    """
    _stand_in_for_torchvision()
    from vllm.model_executor.models import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    (name,) = json.loads((Path(model_dir) / "config.json").read_text("utf-8"))["architectures"]
    model: Any = getattr(importlib.import_module(f"vllm.model_executor.models.{_MODULES[name]}"), name)
    factories = model._processor_factory

    class Info(factories.info):  # type: ignore[misc, name-defined]
        """What the scheduler asks of the processor."""

        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            del seq_len, mm_counts
            return {"image": tokens.max_tokens}

    # The class itself, not its name: vLLM would import a name in a process of its own, which costs half a boot.
    register_processor: Any = MULTIMODAL_REGISTRY.register_processor
    register_processor(_NoProcessor, info=Info, dummy_inputs=factories.dummy_inputs)(model)
    ModelRegistry.register_model(name, model)


class _NoProcessor:
    """In the place of vLLM's processor, which would want a tokenizer: only its `info` is asked for."""

    def __init__(self, info: Any, _dummy_inputs: Any) -> None:
        self.info = info


def features(spans: Sequence[ImageSpan], images: Sequence[Patches]) -> list[Any] | None:
    """vLLM's `mm_features` of a prompt; None without images."""
    if not spans:
        return None
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    from tide_trainer.backends.vllm_pixels import item

    return [
        MultiModalFeatureSpec(
            data=item(patches),
            modality="image",
            # The prefix cache and the encoder cache know an image by this.
            identifier=span.digest,
            mm_position=PlaceholderRange(offset=span.start, length=span.num_tokens),
            mm_hash=span.digest,
        )
        for span, patches in zip(spans, images, strict=True)
    ]


def _stand_in_for_torchvision() -> None:
    """Without torchvision, vLLM's import of one function gets the same function from the PIL form beside it."""
    name = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    if importlib.util.find_spec("torchvision") is None and name not in sys.modules:
        sys.modules[name] = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
