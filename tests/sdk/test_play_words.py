"""What a person types and sees: reading, and words that a terminal must not obey."""

from __future__ import annotations

import base64
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_sdk.play.shown import MAX_CHARS, Shown, safe
from tide_sdk.play.typed import Command, Typo, read_line, tool_call, whole_message

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Go.\x1b[2J",
            "parameters": {
                "type": "object",
                "properties": {"steps": {"type": "integer"}, "word": {"type": "string"}, "far": {"type": "boolean"}},
                "required": ["steps"],
            },
        },
    },
    {"type": "function", "function": {"name": "free"}},
]


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text):
    shown = safe(text)
    assert all(
        unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or char in "\n\t\u200c\u200d" for char in shown
    )
    assert shown.encode().decode() == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07\x1b[31m", "\\x1b]0;title\\x07\\x1b[31m"),
        ("a\rb\x9b2J", "a\\rb\\x9b2J".replace("\\r", "\\x0d")),
        ("\u202eevil\u2066\u200b", "\\u202eevil\\u2066\\u200b"),
        ("two\nlines\tand ümlauts 漢字", "two\nlines\tand ümlauts 漢字"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert safe(text) == shown


def test_a_line_is_a_message_or_a_known_command():
    assert read_line("hello /help") == "hello /help"
    assert read_line("//etc") == "/etc"
    assert read_line("/tool move steps=1 ") == Command("tool", "move steps=1")
    with pytest.raises(Typo, match="there is no /quit"):
        read_line("/quit")


@pytest.mark.parametrize(
    ("typed", "arguments"),
    [
        ("move steps=3", {"steps": 3}),
        ('move steps=3 word="two words" far=true', {"steps": 3, "word": "two words", "far": True}),
        ("move word=3", {"word": "3"}),
        ('move {"steps": [1]}', {"steps": [1]}),
        ("free any=thing n=1", {"any": "thing", "n": 1}),
        ("free", {}),
    ],
)
def test_a_tool_is_called_with_pairs_or_with_json(typed, arguments):
    message = tool_call(typed, TOOLS, 4)
    (call,) = message["tool_calls"]
    assert (message["role"], message["content"], call["id"], call["type"]) == ("assistant", None, "call_4", "function")
    assert call["function"]["name"] == typed.split()[0]
    assert json.loads(call["function"]["arguments"]) == arguments


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("jump", "no tool 'jump'; the environment offers free, move"),
        ("", "no tool ''"),
        ("move step=1", "move takes steps, word, far, not 'step'"),
        ("move 3", "give arguments as name=value"),
        ('move word="open', "cannot be read"),
        ("move {steps}", "no JSON object"),
    ],
)
def test_a_wrong_call_says_what_to_type(typed, told):
    with pytest.raises(Typo) as raised:
        tool_call(typed, TOOLS, 1)
    assert told in str(raised.value)


def test_a_whole_message_is_an_assistants():
    assert whole_message('{"content": "x"}') == {"role": "assistant", "content": "x"}
    with pytest.raises(Typo):
        whole_message("[1]")


def test_images_become_files_and_nothing_is_fetched(tmp_path):
    shown = Shown(tmp_path / "images", colour=False)
    body = b"\x89PNG and more"
    parts = [
        {"type": "text", "text": "look\x1b[1m"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(body).decode()}},
        {"type": "image_url", "image_url": {"url": "https://elsewhere.example/\x1b.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/../../x;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}},
        {"type": "image_url"},
        5,
    ]
    lines = shown.message({"role": "user", "content": parts}).split("\n")
    assert lines[:2] == ["[user]", "look\\x1b[1m"]
    assert lines[2] == f"[image: {tmp_path / 'images' / 'image-1.png'}]"
    assert lines[3] == "[image at https://elsewhere.example/\\x1b.png]"
    assert lines[5] == "[image that is not base64]"
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["image-1.png"]
    assert (tmp_path / "images" / "image-1.png").read_bytes() == body


def test_tools_and_calls_are_shown_safely_and_endless_words_are_cut(tmp_path):
    shown = Shown(tmp_path, colour=False)
    assert shown.tools(TOOLS) == ("  move(steps: integer, word?: string, far?: boolean)  Go.\\x1b[2J\n  free()")
    call = {"function": {"name": "\x1b", "arguments": "{}"}}
    assert shown.message({"role": "assistant", "tool_calls": [call, "odd"]}).split("\n")[1] == "calls \\x1b({})"
    long = shown.message({"role": "user", "content": "x" * (MAX_CHARS + 5)})
    assert long.endswith("[... 5 characters more]")
