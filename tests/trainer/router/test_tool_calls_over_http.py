"""An agent's tool calls through the router: read, answered, sent back, and gone on from."""

from __future__ import annotations

import json

import pytest
from chat_models import written_calls

from tide_trainer.router.supervised import supervised_sequences

TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}]


@pytest.fixture
def renderers(chats):
    """The router of this file's tests speaks Qwen2.5."""
    return {"chatml": chats["qwen25"]}


async def test_a_call_is_answered_and_its_ids_go_on(router, user):
    text = written_calls("qwen25", [("go", {"where": "left"})], lambda data: json.dumps(data, indent=1))
    sampled = [*router.renderer.encode_after(text), router.renderer.stop_token_ids[0]]
    engine = router.engine(lambda prompt: sampled)
    router.open()
    status, answer = await router.chat([user("you")], tools=TOOLS)
    (choice,) = answer["choices"]
    assert (status, choice["finish_reason"]) == (200, "tool_calls")
    (call,) = choice["message"]["tool_calls"]
    talk = [user("you"), choice["message"], {"role": "tool", "content": "a ball", "tool_call_id": call["id"]}]
    await router.chat(talk, tools=TOOLS)
    assert engine.sent[1][: len(engine.sent[0]) + len(sampled)] == [*engine.sent[0], *sampled]
    assert dict(router.events)["turn"]["finish_reason"] == "tool_calls"


async def test_no_call_is_read_where_the_agent_wants_none(router, user):
    text = written_calls("qwen25", [("go", {})])
    router.engine(lambda prompt: [*router.renderer.encode_after(text), router.renderer.stop_token_ids[0]])
    router.open()
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        _, answer = await router.chat([user("you")], **options)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("content", [None, "I go."])
def test_a_demonstration_with_a_call_trains_what_the_template_writes(content, chats):
    renderer = chats["qwen25"]
    call = {"id": "c00000000", "type": "function", "function": {"name": "go", "arguments": '{"where":"left"}'}}
    talk = [
        {"role": "user", "content": "you"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "a ball", "tool_call_id": "c00000000"},
        {"role": "assistant", "content": "done"},
    ]
    (sequence,) = supervised_sequences(renderer, [talk])
    trained = [i for i, s in zip(sequence.token_ids, sequence.sampled, strict=True) if s]
    text = (content + "\n" if content else "") + written_calls("qwen25", [("go", {"where": "left"})])
    assert renderer.decode_after(trained) == f"{text}<|im_end|>done<|im_end|>"
    whole = renderer.render(talk, add_generation_prompt=False).removesuffix("\n")
    assert renderer.decode_after(sequence.token_ids) == whole


def test_a_demonstration_that_the_template_shows_otherwise_is_refused(chats):
    call = {"id": "c00000000", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    talk = [{"role": "user", "content": "you"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(ValueError, match="another way"):
        supervised_sequences(chats["deepseek_r1"], [talk])
