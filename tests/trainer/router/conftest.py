"""Model folders with real kinds of tokenizers and templates, and router apps over them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_models import FAMILIES, make_chat_model
from router_apps import Router, ServedRouter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tide_trainer.router.renderer import Renderer
from tide_trainer.router.state import Limits

SPECIALS = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
    "<|start|>",
    "<|stop|>",
    "<|eot|>",
]
WORDS = ["go", "left", "right", "forward", "you", "see", "a", "red", "ball", "door", "task", "yes"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0]['role'] == 'system' %}"
    "{{- messages[0]['content'] }}{%- endif %}{{- '\\n\\n# Tools' }}{%- for tool in tools %}{{- '\\n' }}"
    "{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role != 'tool' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>' + '\\n' }}{%- else %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools' }}{%- for tool in tools %}{{- '\\n' }}"
    "{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}{%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
THINKING = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content or '' %}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start|>' + m.role + '<|stop|>\\n\\n' + m.content | trim + '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
WORD = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "qwen": (QWEN, "<|im_end|>"),
    "tools": (TOOLS, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
    "llama": (LLAMA, "<|eot|>"),
    "mistral": (MISTRAL, "</s>"),
}


def _folder(path: Path, tokenizer: Tokenizer, template: str, eos: str, bos: str | None) -> Path:
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    config |= {"bos_token": bos} if bos else {}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(eos)}))
    return path


def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    corpus = [
        " ".join(rng.choices([*WORDS, "aaaa", "hello", "<think>", "</think>", "user", "\n"], k=20)) for _ in range(300)
    ]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    """As Llama 2 and Mistral have it: whatever text comes first gets a space before it."""
    vocabulary = {text: i for i, text in enumerate(["<unk>", *SPECIALS, *(f"<0x{i:02X}>" for i in range(256)), "▁"])}
    for letter in "abcdefghijklmnopqrstuvwxyz!":
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def _word() -> Tokenizer:
    specials = ["<pad>", "<unk>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*specials, *WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(specials)
    return tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {"word": _folder(root / "word", _word(), WORD, "<end>", None)}
    bpe = _bpe()
    for name, (template, eos) in TEMPLATES.items():
        found[name] = _folder(root / name, bpe, template, eos, "<s>")
    found["metaspace"] = _folder(root / "metaspace", _metaspace(), MISTRAL, "</s>", "<s>")
    return found


@pytest.fixture(scope="session")
def renderers(folders: dict[str, Path]) -> dict[str, Renderer]:
    return {name: Renderer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def chat_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {name: make_chat_model(root / name, name) for name in FAMILIES}


@pytest.fixture(scope="session")
def chats(chat_folders: dict[str, Path]) -> dict[str, Renderer]:
    return {name: Renderer(folder) for name, folder in chat_folders.items()}


@pytest.fixture
def router(renderers: dict[str, Renderer]) -> Router:
    return Router(renderers["chatml"])


@pytest.fixture
def user() -> Callable[[str], dict[str, str]]:
    return lambda text: {"role": "user", "content": text}


@pytest.fixture
async def served(renderers: dict[str, Renderer]):
    """A router with a model that calls tools; it keeps held streams alive every 0.05 s."""
    served = ServedRouter(renderers["tools"], Limits(hold_timeout_s=20.0, keep_alive_s=0.05))
    await served.start()
    yield served
    await served.stop()
