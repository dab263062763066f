"""Model folders in the manner of five families: their chat templates' layouts, and small tokenizers with their tokens.

The templates are written here, not copied; what each does to history is what its family's does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_TEMPLATES = Path(__file__).parent / "chat_templates"
_DEEPSEEK_CALLS = [
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
]
_QWEN = (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>", "<think>", "</think>"])
_LLAMA = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
_MISTRAL = [
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
_DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        template: the file of its chat template.
        special: tokens that decoding leaves out.
        added: tokens that it keeps.
        stop: tokens that end a reply, the template's first.
        replaced: (text, other text) to make a variant of the template.
    """

    template: str
    special: list[str]
    added: list[str]
    stop: list[str]
    bos: str | None = None
    replaced: tuple[str, str] = ("", "")
    metaspace: bool = False


FAMILIES = {
    "qwen25": Family("qwen25", *_QWEN, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": Family("qwen3", *_QWEN, ["<|im_end|>", "<|endoftext|>"]),
    # The template opens the thinking, as those of models that always think do.
    "qwen3_opened": Family(
        "qwen3",
        *_QWEN,
        ["<|im_end|>"],
        replaced=(
            "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
            "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
        ),
    ),
    "llama3": Family("llama3", _LLAMA, [], ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], "<|begin_of_text|>"),
    "mistral": Family("mistral", _MISTRAL, [], ["</s>"], "<s>", metaspace=True),
    "deepseek": Family("deepseek", _DEEPSEEK, _DEEPSEEK_CALLS, [_DEEPSEEK[1]], _DEEPSEEK[0]),
    # It opens the thinking, and shows none of earlier turns.
    "deepseek_r1": Family(
        "deepseek",
        _DEEPSEEK,
        [*_DEEPSEEK_CALLS, "<think>", "</think>"],
        [_DEEPSEEK[1]],
        _DEEPSEEK[0],
        ("message.content if message.content is not none else ''", "(message.content or '').split('</think>')[-1]"),
    ),
}


def make_chat_model(folder: Path, name: str) -> Path:
    """Write the folder of one family: tokenizer, its configuration, template, and generation configuration."""
    family = FAMILIES[name]
    folder.mkdir(parents=True)
    tokenizer = _metaspace(family) if family.metaspace else _byte_level(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (_TEMPLATES / f"{family.template}.jinja").read_text("utf-8").replace(*family.replaced)
    if name == "deepseek_r1":
        template = template.replace("'<｜Assistant｜>' }}\n{%- endif", "'<｜Assistant｜><think>\\n' }}\n{%- endif")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.stop[0]}
    config |= {"bos_token": family.bos} if family.bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    stop_ids = [tokenizer.token_to_id(text) for text in family.stop]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    return folder


def _byte_level(family: Family) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_text(), trainer)
    _add(tokenizer, family)
    return tokenizer


def _metaspace(family: Family) -> Tokenizer:
    """As SentencePiece has it: whatever text comes first gets a space before it, and bytes stand for what is rare."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # type: ignore[assignment]
    trained.train_from_iterator(_text(), trainers.BpeTrainer(vocab_size=400, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *family.special, *(f"<0x{i:02X}>" for i in range(256)), *learnt["vocab"]]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(pair) for pair in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add(tokenizer, family)
    return tokenizer


def _add(tokenizer: Tokenizer, family: Family) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.added])


def _text() -> list[str]:
    rng = random.Random(0)
    words = [
        "go",
        "left",
        "right",
        "forward",
        "hello",
        "aaaa",
        "user",
        "assistant",
        '{"name":',
        '"arguments":',
        "é",
        "日本",
    ]
    return [" ".join(rng.choices([*words, "you see a red ball", "\n", "\n\n", "  "], k=20)) for _ in range(200)]


def written_calls(name: str, calls: list[tuple[str, dict[str, Any]]], dumps: Callable[[Any], str] = json.dumps) -> str:
    """Calls as a model of the family writes them; `dumps` writes the JSON."""
    template = FAMILIES[name].template
    if template == "llama3":
        ((tool, arguments),) = calls
        return dumps({"name": tool, "parameters": arguments})
    if template == "mistral":
        return "[TOOL_CALLS] " + dumps([{"name": tool, "arguments": arguments} for tool, arguments in calls])
    if template == "deepseek":
        fenced = "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
            for tool, arguments in calls
        )
        return f"<｜tool▁calls▁begin｜>{fenced}<｜tool▁calls▁end｜>"
    return "\n".join(
        f"<tool_call>\n{dumps({'name': tool, 'arguments': arguments})}\n</tool_call>" for tool, arguments in calls
    )
