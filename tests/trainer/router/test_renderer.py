"""The renderer gives exactly what transformers gives, without importing it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chat_models import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_trainer.errors import ConfigurationError
from tide_trainer.router.renderer import Renderer, RenderError

TOOLS = [{"type": "function", "function": {"name": "go", "description": "<walk> & 'go' é", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "You play."}
TALK = [
    {"role": "user", "content": "  you see a red ball\n"},
    {"role": "assistant", "content": "<think>\nhmm\n</think>\n\ngo left "},
    {"role": "user", "content": "☃ <|im_end|> é\u2028"},
]


@pytest.mark.parametrize("name", ["word", "chatml", "qwen", "thinking", "llama", "mistral", "metaspace"])
def test_output_equals_transformers(name, folders, renderers):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(str(folders[name])), renderers[name]
    for messages in (TALK, TALK[:1], TALK[:2]) if "INST" in str(theirs.chat_template) else ([SYSTEM, *TALK], TALK[:2]):
        for tools in (None, TOOLS):
            for prompt in (True, False):
                text = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
                assert ours.render(messages, tools, add_generation_prompt=prompt) == text
                ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=False)
                assert ours.encode(text) == ids


CALL = {"id": "c00000000", "type": "function", "function": {"name": "go", "arguments": {"where": "é", "n": [1]}}}
RESULT = {"role": "tool", "content": "a ball <|eot_id|>", "tool_call_id": "c00000000"}


def equals_theirs(theirs, ours, talk):
    called = {"role": "assistant", "content": None if ours.format.null_content else "", "tool_calls": [CALL]}
    text_call = CALL | {"function": CALL["function"] | {"arguments": json.dumps(CALL["function"]["arguments"])}}
    if ours.format.arguments_text:
        called["tool_calls"] = [text_call]
    for messages in (talk, [*talk, called, RESULT], [SYSTEM, *talk, called, RESULT, TALK[1], TALK[2]]):
        for tools in (None, TOOLS):
            for prompt in (True, False):
                text = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
                ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=False)
                # As OpenAI's API has it: arguments are text.
                sent = [m | {"content": None, "tool_calls": [text_call]} if "tool_calls" in m else m for m in messages]
                assert ours.render(sent, tools, add_generation_prompt=prompt) == text
                assert ours.encode(text) == ids


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_thinking_and_results_equal_transformers(name, chat_folders, chats):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(chat_folders[name]))
    equals_theirs(theirs, chats[name], TALK[:1])


@pytest.mark.vllm
def test_a_published_template_equals_transformers(chat_folders, tmp_path):
    from transformers import AutoTokenizer

    (vllm,) = importlib.util.find_spec("vllm").submodule_search_locations
    published = Path(vllm) / "transformers_utils" / "chat_templates" / "template_minicpmv45.jinja"
    folder = tmp_path / "model"
    shutil.copytree(chat_folders["qwen3"], folder)
    shutil.copy(published, folder / "chat_template.jinja")
    ours = Renderer(folder)
    assert (ours.format.tools, ours.format.reasoning, ours.format.shown_calls) == ("hermes", "think", 64)
    equals_theirs(AutoTokenizer.from_pretrained(str(folder)), ours, TALK[:1])


def test_the_templates_own_refusal_is_told(renderers):
    with pytest.raises(RenderError, match="Only user and assistant roles"):
        renderers["mistral"].render([SYSTEM])


def test_a_template_cannot_reach_out_of_its_sandbox(folders, tmp_path):
    for file in folders["word"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RenderError):
        Renderer(tmp_path).render(TALK)


def test_generation_blocks_and_loop_controls_render(folders, tmp_path):
    for file in folders["word"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert Renderer(tmp_path).render([{"role": "user", "content": "go"}, SYSTEM]) == "go"


def test_missing_parts_are_named(folders, tmp_path):
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json is missing"):
        Renderer(tmp_path)
    config = json.loads((folders["word"] / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        Renderer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folders["word"] / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigurationError, match="no chat template"):
        Renderer(tmp_path)


@pytest.mark.parametrize("name", ["chatml", "metaspace", "word"])
@given(text=st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_text_after_a_special_token_is_encoded_as_in_its_place(name, text, renderers):
    ours = renderers[name]
    eos = {"chatml": "<|im_end|>", "metaspace": "</s>", "word": "<end>"}[name]
    before = ours.encode("go" + eos)
    assert before + ours.encode_after(text) == ours.encode("go" + eos + text)


def test_stop_ids_and_text(renderers):
    ours = renderers["chatml"]
    (stop,) = ours.stop_token_ids
    assert ours.token_text(stop) == "<|im_end|>"
    assert ours.decode([*ours.encode("go left"), stop]) == "go left"
    assert ours.single_token("<|im_end|>") == stop
    assert ours.single_token("go left and so on") is None


def test_no_heavy_library_is_imported():
    code = (
        "import sys, tide_trainer.router.__main__\n"
        "print([name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
