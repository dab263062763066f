"""From what a model wrote to the message that the agent gets."""

from __future__ import annotations

import json

import pytest
from captured_play import Play, spelled
from chat_models import FAMILIES, written_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_trainer import types
from tide_trainer.router.replies import Expected, is_answer, read_reply
from tide_trainer.router.reply_format import TOOL_FORMATS
from tide_trainer.router.tool_calls import FORMATS, MAX_CALLS, MAX_CHARS, split_calls, write_arguments
from tide_trainer.settings_play import ModelSettings

TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": "you"}]
DEEP = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"


def read(renderer, text, *, tools=True, opened="", reason="stop", stop=()):
    ids = (*spelled(renderer, text), renderer.stop_token_ids[0])
    completion = types.Completion(ids, (0.0,) * len(ids), 0, reason)
    return read_reply(renderer, Expected(7, tools, opened), completion, stop)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_as_the_family_writes_it_is_told_as_openai_does(name, chats):
    num = 1 if name == "llama3" else 2
    calls = [("go", {"where": "left é", "n": [1, {"b": None}]}), ("stay", {})][:num]
    reply = read(chats[name], written_calls(name, calls), opened="<think>\n" if name == "deepseek_r1" else "")
    if name == "deepseek_r1":  # all of it is thinking that never ended
        assert reply.message["reasoning_content"].startswith("<｜tool▁calls▁begin｜>")
        reply = read(chats[name], "a ball\n</think>\n\n" + written_calls(name, calls), opened="<think>\n")
    assert reply.finish_reason == "tool_calls"
    assert reply.message["content"] is None
    told = reply.message["tool_calls"]
    assert [(c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in told] == [
        ("function", *call) for call in calls
    ]
    assert [call["id"] for call in told] == ["c00000700", "c00000701"][:num]


@pytest.mark.parametrize(
    ("format", "text", "before"),
    [
        ("hermes", 'I go.\n<tool_call>{"name": "go", "arguments": {"x": "</tool_call>"}}</tool_call> ', "I go.\n"),
        ("hermes", '<tool_call>{"arguments": {"x": "</tool_call>"}, "name": " go "}</tool_call>', ""),
        ("mistral", '[TOOL_CALLS][{"name": "go", "arguments": {"x": "</tool_call>"}, "id": "a"}]', ""),
        ("mistral", 'so [TOOL_CALLS]go[ARGS]{"x": "</tool_call>"}', "so "),
        ("mistral", '[TOOL_CALLS]go{"x": "</tool_call>"}', ""),
        ("llama3", ' {"name": "go", "parameters": {"x": "</tool_call>"}}', ""),
        ("llama3", '<|python_tag|>{"type": "function", "name": "go", "arguments": {"x": "</tool_call>"}}', ""),
        (
            "deepseek",
            "so<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>go<｜tool▁sep｜>"
            '{"x": "</tool_call>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "so",
        ),
    ],
)
def test_ways_to_write_a_call(format, text, before):
    found, calls = split_calls(text, format)
    assert found == before
    assert [(call.name, call.arguments) for call in calls] == [("go", {"x": "</tool_call>"})]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "go", "arguments": {}}',
        '<tool_call>{"name": "go", "arguments": {}}</tool_call> and then',
        '<tool_call>{"name": "go", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "go", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "go", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "go", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "go", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "go"}</tool_call>',
        '<tool_call>["go", {}]</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>",
        '<tool_call>{"name": "go", "arguments": ' + DEEP + "}</tool_call>",
        '<tool_call>{"name": "go", "arguments": {}}</tool_call>' * (MAX_CALLS + 1),
        '<tool_call>{"name": "go", "arguments": {"a": "' + "x" * MAX_CHARS + '"}}</tool_call>',
        '[TOOL_CALLS][{"name": "go", "arguments": {}}] and then',
        '[TOOL_CALLS]{"a": 1}',
        "[TOOL_CALLS]7",
        "[TOOL_CALLS][]",
        '[TOOL_CALLS]["go"]',
        '{"name": "go", "parameters": {}, "why": "not"}',
        '{"name": "go", "parameters": {}, "arguments": {}}',
        '{"name": "go", "parameters": {}} and then',
        "<|python_tag|>print(1)",
        "<|python_tag|>",
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
)
def test_what_is_malformed_stays_content(text):
    for format in FORMATS:
        assert split_calls(text, format) == (text, ())


def test_a_malformed_call_reaches_the_agent_with_its_marker(chats):
    for name, text in (("mistral", "[TOOL_CALLS] [{"), ("llama3", "<|python_tag|>print(1)")):
        reply = read(chats[name], text)
        assert reply.message == {"role": "assistant", "content": text}
        assert reply.finish_reason == "stop"


@pytest.mark.parametrize("name", ["qwen25", "llama3", "mistral", "deepseek"])
def test_calls_are_read_only_where_they_are_wanted_and_whole(name, chats):
    text = written_calls(name, [("go", {})])
    for options in ({"tools": False}, {"reason": "length"}, {"stop": ("go",)}):
        reply = read(chats[name], text, **options)
        assert "tool_calls" not in reply.message
        assert reply.finish_reason == options.get("reason", "stop")
    # More calls than the template can show again are none.
    several = "; ".join(written_calls("llama3", [("go", {})]) for _ in range(2))
    assert read(chats["llama3"], several).message["content"] == several


@pytest.mark.parametrize(
    ("text", "opened", "thinking", "content"),
    [
        ("<think>\na\n</think>\n\ngo ", "", "a", "go "),
        (" <think>a</think>go", "", "a", "go"),
        ("a\n</think>\n\ngo", "<think>\n", "a", "go"),
        ("a <think> b", "<think>\n", "a <think> b", ""),
        ("<think>\n\n</think>\n\ngo", "", None, "go"),
        ("</think>go", "<think>", None, "go"),
        ("a</think>go", "", None, "a</think>go"),
        ("go <think>a</think>", "", None, "go <think>a</think>"),
        ("<think>a</think>b</think>", "", "a", "b</think>"),
    ],
)
def test_thinking_is_told_apart(text, opened, thinking, content, chats):
    message = read(chats["qwen3"], text, opened=opened).message
    assert (message.get("reasoning_content"), message["content"]) == (thinking, content)


def test_a_call_within_thinking_is_none(chats):
    call = written_calls("qwen3", [("go", {})])
    reply = read(chats["qwen3"], f"<think>{call}</think>go")
    assert (reply.message["content"], reply.message["reasoning_content"]) == ("go", call)
    assert not reply.has_calls


def test_the_prompt_says_whether_thinking_is_open_and_calls_are_wanted(chats):
    plans = {name: Play(chats[name]).capture.plan(USER, TOOLS).expected for name in FAMILIES}
    opened = {name: expected.opened for name, expected in plans.items() if expected.opened}
    assert opened == {"qwen3_opened": "<think>\n", "deepseek_r1": "<think>\n"}
    assert all(expected.tools for expected in plans.values())
    assert not Play(chats["qwen3"]).capture.plan(USER).expected.tools
    assert not Play(chats["qwen3"]).capture.plan(USER, TOOLS, read_calls=False).expected.tools


MARKERS = sorted({marker for format in FORMATS.values() for marker in format.markers})
PIECES = [
    *MARKERS,
    "<think>",
    "</think>",
    '{"name": "go", ',
    '"arguments": ',
    '"parameters": ',
    "{",
    "}",
    "[",
    "]",
    ";",
]


@given(
    name=st.sampled_from(sorted(FAMILIES)),
    pieces=st.lists(st.sampled_from([*PIECES, "function", "```json\n", "```", "\n", "go"]) | st.text(max_size=4)),
    opened=st.sampled_from(["", "<think>\n"]),
)
@settings(max_examples=150, deadline=None)
def test_nothing_that_is_sampled_raises_or_is_lost(name, pieces, opened, chats):
    text = "".join(pieces)
    reply = read(chats[name], text, opened=opened)
    message = reply.message
    json.dumps(message)
    assert is_answer(json.loads(json.dumps(message)), message)
    if not reply.has_calls and "reasoning_content" not in message and reply.shown is None:
        assert message["content"] == reply.text
    for word in ("content", "reasoning_content"):
        assert (message.get(word) or "") in reply.text


@given(data=st.recursive(st.none() | st.text(max_size=3), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
@settings(max_examples=60, deadline=None)
def test_no_message_of_an_agent_raises(data, chats):
    answered = read(chats["qwen25"], written_calls("qwen25", [("go", {})])).message
    for message in (
        {"tool_calls": data},
        {"tool_calls": [data]},
        {"tool_calls": [{"id": "c00000700", "function": data}]},
    ):
        assert not is_answer(answered | message, answered)
    for message in ({"content": data}, {"reasoning_content": data}, {"role": data}):
        is_answer(answered | message, answered)


def test_the_settings_name_the_formats_that_there_are():
    def words(field):
        return set(ModelSettings.model_fields[field].annotation.__args__)

    assert words("tool_format") == set(TOOL_FORMATS)
    assert words("reasoning_format") == {"auto", "think", "none"}


def test_arguments_that_grow_too_long_when_written_anew_are_another_message():
    arguments = {"a": [1] * (MAX_CHARS // 3 + 1)}
    call = {"id": "c00000000", "type": "function", "function": {"name": "go", "arguments": write_arguments(arguments)}}
    answered = {"role": "assistant", "content": None, "tool_calls": [call]}
    short = json.dumps(arguments, separators=(",", ":"))
    assert len(short) < MAX_CHARS < len(call["function"]["arguments"])
    sent = {**answered, "tool_calls": [{**call, "function": {"name": "go", "arguments": short}}]}
    assert not is_answer(sent, answered)
