"""Makes a tiny Qwen3 or Qwen2.5-VL model and its word-level tokenizer from a seed: nothing is downloaded.

    make_tiny_model("models/tiny", words, TinyModel(seed=0))

The folder is an ordinary Hugging Face model folder: `AutoModelForCausalLM`, `AutoTokenizer` and vLLM load it offline.

The chat template is append-only: the rendering of n messages is a prefix of the rendering of n + 1, and an assistant
message renders as `<assistant> words <end>`, so that a sampled reply is `words <end>` and `<end>` is the eos token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tide_trainer.backends import tiny_vision
from tide_trainer.errors import ConfigurationError

PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
ROLES = ("system", "user", "assistant", "tool")
SPECIALS = (PAD, UNKNOWN, END, *(f"<{role}>" for role in ROLES))
MAX_WORDS = 50_000

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION = (VISION_START, VISION_END, IMAGE, VIDEO)
"""Only in a model that takes images; the names are those of its family."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}"
    "{% if part['type'] in ('image', 'image_url') %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] or '' }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<end>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The shape of the model. The defaults have about 0.3 M parameters.

    Attributes:
        seed: of the initial weights.
        hidden: width of the residual stream.
        layers: number of transformer blocks.
        heads: query heads of 32 (vLLM's CPU attention wants a multiple of 32).
        kv_heads: key and value heads; divides `heads`.
        feed_forward: width of the gated feed-forward layer.
        max_context_tokens: longest sequence.
        init_std: standard deviation of the initial weights; None takes 1 / sqrt(hidden).
        vision: True: a Qwen2.5-VL model, which also takes images.
    """

    seed: int = 0
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 256
    max_context_tokens: int = 1024
    init_std: float | None = None
    vision: bool = False


HEAD_DIM = 32


def load_words(source: str | Sequence[str]) -> list[str]:
    """The vocabulary's words: a list as it is, or a text file with one word a line.

    Raises:
        ConfigurationError: the file is missing, or a word is empty, has white space, or is a special token.
    """
    if isinstance(source, str):
        try:
            lines = Path(source).read_text("utf-8").splitlines()
        except OSError as error:
            raise ConfigurationError("model.words", f"name a readable file with one word a line ({error})") from error
        source = [line for line in lines if line]
    words = list(dict.fromkeys(source))
    for word in words:
        if not word or word.split() != [word] or word in SPECIALS or word in VISION:
            raise ConfigurationError(
                "model.words", f"remove {word!r}: a word has no white space and is no special token"
            )
    if not 1 <= len(words) <= MAX_WORDS:
        raise ConfigurationError("model.words", f"give 1 to {MAX_WORDS} words, not {len(words)}")
    return words


def make_tokenizer(words: Iterable[str], *, vision: bool = False) -> Any:
    """A `PreTrainedTokenizerFast` that splits at white space; an unknown word is `<unk>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    extra = VISION if vision else ()
    vocabulary = {word: number for number, word in enumerate([*SPECIALS, *extra, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[*(f"<{role}>" for role in ROLES), *extra],
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(directory: str | Path, words: str | Sequence[str], shape: TinyModel) -> Path:
    """Writes the model folder and returns it; an existing folder of the same shape and words is kept as it is.

    Args:
        directory: the folder to write.
        words: the vocabulary, as `load_words` takes it.
        shape: the model's shape and seed.

    Raises:
        ConfigurationError: the words or the shape cannot be used.
    """
    import torch
    from transformers import GenerationConfig

    _check(shape)
    folder, listed = Path(directory), load_words(words)
    recipe = json.dumps({"shape": asdict(shape), "words": listed}, sort_keys=True)
    stamp = folder / "tiny_model.json"
    if stamp.is_file() and stamp.read_text("utf-8") == recipe:
        return folder
    tokenizer = make_tokenizer(listed, vision=shape.vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model: Any = (tiny_vision.make(shape, tokenizer) if shape.vision else _make_text(shape, tokenizer)).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if shape.vision:
        tiny_vision.write_processor(folder)
    stamp.write_text(recipe, "utf-8")
    return folder


def _make_text(shape: TinyModel, tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=shape.max_context_tokens,
        initializer_range=shape.init_std or shape.hidden**-0.5,
        # Untied: vLLM's CPU build prepacks tied weights, which then no longer follow an update in place.
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _check(shape: TinyModel) -> None:
    for name in ("hidden", "layers", "heads", "kv_heads", "feed_forward", "max_context_tokens"):
        if getattr(shape, name) < 1:
            raise ConfigurationError(f"model.{name}", "give a number of at least 1")
    if shape.heads % shape.kv_heads:
        raise ConfigurationError("model.kv_heads", f"give a divisor of heads ({shape.heads})")
    if shape.vision and shape.hidden != shape.heads * HEAD_DIM:
        raise ConfigurationError(
            "model.hidden_size", f"give num_heads ({shape.heads}) times {HEAD_DIM}: a model with images has no other"
        )
