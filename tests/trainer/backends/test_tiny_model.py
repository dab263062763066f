"""The tiny model and its tokenizer: words in, words out, an append-only template, loaded offline."""

from __future__ import annotations

import json

import pytest
import torch

from tide_trainer.backends.tiny_model import TinyModel, load_words, make_tiny_model, make_tokenizer
from tide_trainer.errors import ConfigurationError
from tide_trainer.images import ImageTokens, image_size

WORDS = ["left", "right", "forward", "go", "to", "red", "ball", ".", "3-ahead"]
TALK = [
    {"role": "system", "content": "go"},
    {"role": "user", "content": "go to red ball . 3-ahead"},
    {"role": "assistant", "content": "left"},
    {"role": "user", "content": "red ball", "expert_action": "left"},
    {"role": "assistant", "content": "forward"},
    {"role": "tool", "content": [{"type": "text", "text": "right"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), WORDS, TinyModel(hidden=64, layers=1, feed_forward=64))


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def render(tokenizer, messages, prompt=False):
    return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=prompt, return_dict=False)


def test_the_template_is_append_only(tokenizer):
    for count in range(1, len(TALK)):
        shorter, longer = render(tokenizer, TALK[:count]), render(tokenizer, TALK[: count + 1])
        assert longer[: len(shorter)] == shorter


def test_a_sampled_reply_is_what_the_template_renders(tokenizer):
    prompt = render(tokenizer, TALK[:2], prompt=True)
    sampled = [tokenizer.convert_tokens_to_ids("left"), tokenizer.eos_token_id]
    assert render(tokenizer, TALK[:3]) == prompt + sampled
    assert tokenizer.decode(sampled, skip_special_tokens=True) == "left"


def test_a_turn_is_short(tokenizer):
    assert tokenizer.convert_ids_to_tokens(render(tokenizer, TALK[1:3])) == [
        "<user>", "go", "to", "red", "ball", ".", "3-ahead", "<assistant>", "left", "<end>"
    ]  # fmt: skip


def test_words_go_through_unchanged_and_unknown_ones_are_unk(tokenizer):
    text = "go to red ball . 3-ahead"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("purple")["input_ids"] == [tokenizer.unk_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_it_loads_offline_and_stops_at_the_end_token(folder, tokenizer):
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim % 32 == 0
    assert not model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, len(tokenizer))


def test_the_default_size():
    shape = TinyModel()
    assert (shape.hidden, shape.layers) == (128, 2)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    shape = {"hidden": 32, "layers": 1, "heads": 1, "kv_heads": 1, "feed_forward": 32}
    states = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(99 + len(states))
        made = make_tiny_model(tmp_path / name, WORDS, TinyModel(seed=seed, **shape))
        states.append((made / "model.safetensors").read_bytes())
    assert states[0] == states[1]
    assert states[0] != states[2]


def test_a_folder_of_the_same_recipe_is_kept_and_another_recipe_replaces_it(tmp_path):
    shape = TinyModel(hidden=32, layers=1, heads=1, kv_heads=1, feed_forward=32)
    made = make_tiny_model(tmp_path / "m", WORDS, shape)
    before = (made / "model.safetensors").stat().st_mtime_ns
    make_tiny_model(tmp_path / "m", WORDS, shape)
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    make_tiny_model(tmp_path / "m", [*WORDS, "purple"], shape)
    assert json.loads((made / "config.json").read_text())["vocab_size"] == len(make_tokenizer([*WORDS, "purple"]))


def test_words_come_from_a_file_too(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("left\nright\n\nleft\n")
    assert load_words(str(file)) == ["left", "right"]
    with pytest.raises(ConfigurationError, match=r"model\.words"):
        load_words(str(tmp_path / "missing.txt"))


@pytest.mark.parametrize("bad", [["two words"], [""], ["<end>"], []])
def test_bad_words_are_refused(bad):
    with pytest.raises(ConfigurationError, match=r"model\.words"):
        load_words(bad)


@pytest.mark.parametrize(("name", "value"), [("kv_heads", 3), ("layers", 0), ("hidden", 0)])
def test_bad_shapes_name_the_field(tmp_path, name, value):
    with pytest.raises(ConfigurationError, match=name):
        make_tiny_model(tmp_path, WORDS, TinyModel(**{name: value}))


def test_a_model_that_takes_images_renders_them_as_its_family_does(tmp_path):
    from pictures import picture, vision_model
    from transformers import AutoTokenizer

    folder = vision_model(tmp_path)
    tokens = ImageTokens.read(folder)
    assert tokens is not None
    seeing = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "w1"}]
    ids = render(seeing, [{"role": "user", "content": parts}])
    names = ["<user>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "w1"]
    assert seeing.convert_ids_to_tokens(ids) == names
    assert ids[2] == tokens.placeholder_id
    assert tokens.placeholder_text == "<|image_pad|>"
    assert tokens.count(*image_size(picture(1))) == 12


@pytest.mark.parametrize(
    ("words", "shape", "field"),
    [
        (["<|image_pad|>"], TinyModel(vision=True), "model.words"),
        (WORDS, TinyModel(vision=True, hidden=64, heads=4), "model.hidden_size"),
    ],
)
def test_a_model_that_takes_images_cannot_have_every_shape(tmp_path, words, shape, field):
    with pytest.raises(ConfigurationError) as caught:
        make_tiny_model(tmp_path, words, shape)
    assert caught.value.field == field
