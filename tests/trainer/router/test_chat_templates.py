"""Five families' chat templates: their ids go on exactly, or the segment breaks where a template changes history."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
from captured_play import Play, check_books, spelled
from chat_models import FAMILIES, written_calls

from tide_trainer.errors import ConfigurationError
from tide_trainer.router.renderer import Renderer

TOOLS = [{"type": "function", "function": {"name": "go", "description": "walk", "parameters": {"type": "object"}}}]
THINKS = ("qwen3", "qwen3_opened", "deepseek_r1")


def user(text):
    return {"role": "user", "content": text}


def result(call_id, text="a red ball"):
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def read_as(segment, renderer):
    """A segment as [(sampled, text)], a run each."""
    pairs = zip(segment.token_ids, segment.sampled, strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [(sampled, renderer.decode_after([i for i, _ in run])) for sampled, run in runs]


def two_questions(play, name, loads=lambda message: message):
    """Two questions, each with a call, its result and an answer, spelled as encoding would not do it."""
    stop, talk = play.renderer.stop_token_ids[0], [user("hello user")]
    for question in ("hello", "left"):
        for text in (written_calls(name, [("go", {"where": question})]), " go forward" if name == "mistral" else "go"):
            if name in THINKS:
                start = "" if play.renderer.render(talk, TOOLS).endswith("<think>\n") else "<think>\n"
                text = f"{start}a ball\n</think>\n\n{text}"
            reply = play.reply(talk, [*spelled(play.renderer, text), stop], tools=TOOLS)
            talk = [*talk, loads(copy.deepcopy(dict(reply.message)))]
            if reply.has_calls:
                talk.append(result(reply.message["tool_calls"][0]["id"]))
        talk.append(user(question))
    return talk


@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("qwen25", 0),
        ("qwen3", 1),  # the second question drops the thinking of the first
        ("qwen3_opened", 1),
        ("llama3", 0),
        ("mistral", 1),  # the tools move to the second question
        ("deepseek", 0),
        ("deepseek_r1", 3),  # thinking is never shown again
    ],
)
def test_s1_ids_go_on_exactly_or_the_segment_breaks(name, breaks, chats):
    play = Play(chats[name])
    two_questions(play, name)
    assert play.capture.num_breaks == breaks
    assert len(play.capture.segments()) == breaks + 1
    assert [reply.has_calls for reply in play.replies] == [True, False] * 2
    assert sum(sum(segment.sampled) for segment in play.capture.segments()) == sum(len(b[1]) for b in play.books)
    check_books(play)


@pytest.mark.parametrize("name", FAMILIES)
def test_s1_what_an_agent_does_to_its_message_is_undone(name, chats):
    """Agents lose thinking, write JSON anew, and take null content for empty content."""

    def careless(message):
        message.pop("reasoning_content", None)
        message["content"] = message["content"] or ("" if message.get("tool_calls") else None)
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"), indent=1)
            call["function"] = {"arguments": arguments, "name": call["function"]["name"]}
        return message

    careful, other = Play(chats[name]), Play(chats[name])
    two_questions(careful, name)
    two_questions(other, name, careless)
    assert other.books == careful.books
    assert other.capture.segments() == careful.capture.segments()


def test_s1_json_that_the_template_writes_otherwise_is_appended(chats):
    renderer = chats["qwen25"]
    play, stop = Play(renderer), renderer.stop_token_ids[0]
    text = (
        '<tool_call> {"arguments":{"b":"\\u00e9 <|im_end|> <\\u007cim_end|>","a":[1,2.50]},\n"name":"go"}</tool_call>\n'
    )
    ids = [*spelled(renderer, text, markers=False), stop]
    reply = play.reply([user("you")], ids, tools=TOOLS)
    arguments = reply.message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"b": "é <|im_end|> <|im_end|>", "a": [1, 2.5]}
    play.reply([user("you"), reply.message, result("c00000000")], [stop], tools=TOOLS)
    (segment,) = play.capture.segments()
    assert segment.token_ids[len(play.books[0][0]) :][: len(ids)] == tuple(ids)
    assert read_as(segment, renderer)[2][1] == (
        "\n<|im_start|>user\n<tool_response>\na red ball\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("edit", ["name", "arguments", "content", "dropped", "doubled"])
def test_s1_an_edited_call_breaks_the_segment(edit, chats):
    renderer = chats["qwen25"]
    play, stop = Play(renderer), renderer.stop_token_ids[0]
    text = "I go.\n" + written_calls("qwen25", [("go", {"a": 1})])
    message = dict(play.reply([user("you")], [*spelled(renderer, text), stop], tools=TOOLS).message)
    (call,) = message["tool_calls"]
    function = call["function"]
    message |= {
        "name": {"tool_calls": [call | {"function": function | {"name": "stay"}}]},
        "arguments": {"tool_calls": [call | {"function": function | {"arguments": '{"a": 2}'}}]},
        "content": {"content": "I stay."},
        "dropped": {"tool_calls": []},
        "doubled": {"tool_calls": [call, call]},
    }[edit]
    play.reply([user("you"), message, result(call["id"])], [stop], tools=TOOLS)
    assert play.capture.num_breaks == 1
    check_books(play)


def test_s1_a_newline_after_the_end_token_belongs_to_what_follows(chats):
    renderer = chats["qwen25"]
    play, stop = Play(renderer), renderer.stop_token_ids[0]
    reply = play.reply([user("you")], [*spelled(renderer, "hello"), stop])
    play.reply([user("you"), reply.message, user("go")], [stop])
    (segment,) = play.capture.segments()
    after = segment.token_ids.index(stop, len(play.books[0][0])) + 1
    assert segment.sampled[after - 1]
    assert not segment.sampled[after]
    assert renderer.token_text(segment.token_ids[after]) == "\n"


@pytest.mark.parametrize("text", ["go", " go \n", "go\r\n"])
def test_s1_a_template_that_trims_breaks_only_where_there_is_something_to_trim(text, chats):
    play, stop = Play(chats["llama3"]), chats["llama3"].stop_token_ids[0]
    reply = play.reply([user("you")], [*spelled(play.renderer, text), stop])
    assert reply.message["content"] == text
    play.reply([user("you"), reply.message, user("yes")], [stop])
    assert play.capture.num_breaks == (text != text.strip())
    check_books(play)


def test_s1_an_empty_thinking_block_that_the_template_strips_breaks(chats):
    renderer = chats["qwen3"]
    play, stop = Play(renderer), renderer.stop_token_ids[0]
    reply = play.reply([user("you")], [*spelled(renderer, "<think>\n\n</think>\n\ngo"), stop])
    assert reply.message == {"role": "assistant", "content": "go"}
    play.reply([user("you"), reply.message, user("yes")], [stop])
    assert play.capture.num_breaks == 1
    check_books(play)


def test_s1_the_template_ends_thinking_that_was_cut_by_length(chats):
    renderer = chats["qwen3"]
    play, stop = Play(renderer), renderer.stop_token_ids[0]
    reply = play.reply([user("you")], spelled(renderer, "<think>\na ball"), reason="length")
    assert reply.message == {"role": "assistant", "content": "", "reasoning_content": "a ball"}
    assert reply.finish_reason == "length"
    play.reply([user("you"), reply.message], [stop])
    (segment,) = play.capture.segments()
    assert read_as(segment, renderer)[1:3] == [
        (True, "<think>\na ball"),
        (False, "\n</think>\n\n<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_s1_an_end_that_the_template_writes_otherwise_breaks(chats):
    renderer = chats["llama3"]
    play = Play(renderer)
    reply = play.reply([user("you")], [*spelled(renderer, "go"), renderer.single_token("<|eom_id|>")])
    play.reply([user("you"), reply.message, user("yes")], [renderer.stop_token_ids[0]])
    assert play.capture.num_breaks == 1


def test_s6_a_hand_written_mask_of_three_turns_with_a_call(chats):
    renderer = chats["qwen25"]
    play, stop = Play(renderer), renderer.stop_token_ids[0]
    talk = [user("hi")]
    call = '<tool_call>\n{"name": "go", "arguments": {"where": "left"}}\n</tool_call>'
    for text, ended, answers in (
        (call, [stop], [result("c00000000")]),
        ("I see", [], [user("yes")]),
        ("go", [stop], []),
    ):
        reply = play.reply(talk, [*spelled(renderer, text), *ended], reason="stop" if ended else "length")
        talk = [*talk, reply.message, *answers]
    # Without tools in the request a call is content, and the template shows it as such.
    assert [m.get("tool_calls") for m in talk] == [None] * len(talk)
    (segment,) = play.capture.segments()
    head = "<|im_start|>system\nYou help with tasks.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    seen = "\n<|im_start|>user\n<tool_response>\na red ball\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert read_as(segment, renderer) == [
        (False, head),
        (True, call + "<|im_end|>"),
        (False, seen),
        (True, "I see"),
        (False, "<|im_end|>\n<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"),
        (True, "go<|im_end|>"),
    ]
    assert all((p != 0.0) == s for p, s in zip(segment.logprobs, segment.sampled, strict=True))


@pytest.mark.parametrize(
    ("name", "tools", "reasoning", "shown"),
    [
        ("qwen25", "hermes", "none", 64),
        ("qwen3", "hermes", "think", 64),
        ("qwen3_opened", "hermes", "think", 64),
        ("llama3", "llama3", "none", 1),
        ("mistral", "mistral", "none", 64),
        ("deepseek", "deepseek", "none", 64),
        ("deepseek_r1", "deepseek", "think", 64),
    ],
)
def test_the_format_of_replies_is_seen_from_the_template(name, tools, reasoning, shown, chats):
    found = chats[name].format
    assert (found.tools, found.reasoning, found.shown_calls) == (tools, reasoning, shown)
    assert found.arguments_text is name.startswith("deepseek")


def test_a_format_that_the_template_does_not_know_is_shown_as_content(chat_folders, folders):
    """Thinking and calls that a template has no field for go on exactly all the same."""
    renderer = Renderer(folders["chatml"], tool_format="hermes", reasoning_format="think")
    play, stop = Play(renderer), renderer.stop_token_ids[0]
    text = "<think>\na ball\n</think>\n\nI go.\n" + written_calls("qwen25", [("go", {"a": 1}), ("go", {"a": 2})])
    reply = play.reply([user("you")], [*spelled(renderer, text), stop], tools=TOOLS)
    assert (reply.message["content"], reply.message["reasoning_content"]) == ("I go.", "a ball")
    assert len(reply.message["tool_calls"]) == 2
    play.reply([user("you"), reply.message, result("c00000000"), result("c00000001")], [stop], tools=TOOLS)
    assert play.capture.num_breaks == 0
    check_books(play)
    none = Renderer(chat_folders["qwen3"], tool_format="none", reasoning_format="none")
    reply = Play(none).reply([user("you")], spelled(none, text), tools=TOOLS)
    assert reply.message == {"role": "assistant", "content": text}
    with pytest.raises(ConfigurationError, match="tool_format"):
        Renderer(folders["chatml"], tool_format="other")
