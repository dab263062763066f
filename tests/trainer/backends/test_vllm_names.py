"""Which live tensor of vLLM's model holds a tensor of the file, where their names differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from tide_trainer.backends.vllm_worker import locate
from tide_trainer.errors import WeightsDiffer


class Decoder(nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"qkv_proj": nn.Linear(2, 6, bias=False)})
        self.lm_head = nn.Linear(2, 3, bias=False)


class Seeing(nn.Module):
    """As Qwen2-VL in vLLM: other names than the file, and fused layers that only its decoder's table has."""

    hf_to_vllm_mapper = SimpleNamespace(
        orig_to_new_prefix={
            "model.language_model.": "language_model.model.",
            "model.visual.": "visual.",
            "lm_head.": "language_model.lm_head.",
            "model.": "language_model.model.",
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(2, 2, bias=False)
        self.language_model = Decoder()


@pytest.mark.parametrize("before", ["model.language_model.", "model."], ids=["published", "saved"])
def test_both_forms_of_names_lead_to_the_live_rows(before):
    model = Seeing()
    with torch.no_grad():
        model.language_model.model["qkv_proj"].weight.copy_(torch.arange(12.0).reshape(6, 2))
    shapes = {f"{before}{name}_proj.weight": (2, 2) for name in "qkv"}
    parts = locate(model, {**shapes, "model.visual.weight": (2, 2), "lm_head.weight": (3, 2)})
    assert set(parts) == {*shapes, "model.visual.weight", "lm_head.weight"}
    assert parts[f"{before}k_proj.weight"].tensor.tolist() == [[4.0, 5.0], [6.0, 7.0]]


def test_a_tensor_of_the_vision_tower_that_is_missing_is_named():
    shapes = {f"model.{name}_proj.weight": (2, 2) for name in "qkv"}
    with pytest.raises(WeightsDiffer, match=r"lacks visual\.weight"):
        locate(Seeing(), {**shapes, "lm_head.weight": (3, 2)})
