"""Tool calls as models write them: parsed from the text of a reply, strictly, and never with an exception.

A reply has calls only if all that follows its first marker is well-formed. Anything else is no call but content, so
that the agent and the environment see what the model really wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from tide_sdk import codec

MAX_CALLS = 64
"""Calls in one reply; more are content."""
MAX_CHARS = 1 << 20
"""Longest text of all calls of one reply."""
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        name: the tool's name, not empty; whether there is such a tool is the environment's matter.
        arguments: a JSON object.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        markers: texts that some tokenizers hold as special tokens, and which must survive decoding.
        read: (text from the first marker on) -> its calls; raises ValueError if it is not well-formed.
        opening: what begins the calls; empty where a reply is a call as a whole.
    """

    markers: tuple[str, ...]
    opening: str
    read: Callable[[str], list[ToolCall]]


def split_calls(text: str, name: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text before the calls, and the calls; (text, ()) if there are none that are well-formed.

    Args:
        text: a reply, or what follows its thinking.
        name: a key of `FORMATS`.
    """
    format = FORMATS[name]
    start = text.find(format.opening) if format.opening else 0
    if start < 0 or len(text) - start > MAX_CHARS:
        return text, ()
    try:
        calls = format.read(text[start:])
    except (ValueError, RecursionError):  # what a model writes is data
        return text, ()
    return (text[:start], tuple(calls)) if 0 < len(calls) <= MAX_CALLS else (text, ())


def same_calls(one: tuple[ToolCall, ...], other: tuple[ToolCall, ...]) -> bool:
    """True if both name the same tools with the same arguments, whatever the JSON looks like."""
    return len(one) == len(other) and all(
        a.name == b.name and codec.same(a.arguments, b.arguments) for a, b in zip(one, other, strict=True)
    )


def read_arguments(text: str) -> dict[str, Any]:
    """The JSON object of an `arguments` text. Raises ValueError if it is none."""
    if len(text) > MAX_CHARS:
        raise ValueError("the arguments are too long")
    data = codec.loads(text)
    codec.check_plain(data)
    if not isinstance(data, dict):
        raise ValueError("the arguments are no JSON object")
    return cast("dict[str, Any]", data)


def write_arguments(arguments: Mapping[str, Any]) -> str:
    """Arguments as the templates' `tojson` writes them."""
    return json.dumps(arguments, ensure_ascii=False)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at`, spaces before it skipped, and where it ends."""
    value, end = _DECODER.raw_decode(text, _skip(text, at))
    codec.check_plain(value)
    return value, end


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _expect(text: str, at: int, words: str) -> int:
    """The place behind `words`, spaces before them skipped. Raises ValueError if they are not there."""
    at = _skip(text, at)
    if not text.startswith(words, at):
        raise ValueError(f"{words} is missing")
    return at + len(words)


def _call(value: Any, *names: str) -> ToolCall:
    """A call out of {"name": ..., <one of names>: {...}}; an id or a type beside them is not needed."""
    if not isinstance(value, dict):
        raise ValueError("a call must be an object")
    found = [name for name in names if name in value]
    if len(found) != 1 or value.keys() - {"name", "id", "type", *found}:
        raise ValueError("a call has a name and its arguments")
    return _named(value.get("name"), value[found[0]])


def _named(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    return ToolCall(name.strip(), arguments)


def _hermes(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    at = 0
    while at < len(text):
        value, at = _json(text, _expect(text, at, "<tool_call>"))
        at = _skip(text, _expect(text, at, "</tool_call>"))
        calls.append(_call(value, "arguments"))
    return calls


def _mistral(text: str) -> list[ToolCall]:
    at = _skip(text, _expect(text, 0, "[TOOL_CALLS]"))
    if text.startswith("[", at):
        value, at = _json(text, at)
        if _skip(text, at) < len(text):
            raise ValueError("text follows the calls")
        return [_call(item, "arguments") for item in value]
    calls: list[ToolCall] = []
    at = 0
    while at < len(text):  # as newer models write it: the marker before each, a name, its arguments
        at = _expect(text, at, "[TOOL_CALLS]")
        brace = text.find("{", at)
        name = text[at : max(brace, at)].strip().removesuffix("[ARGS]")
        value, at = _json(text, max(brace, at))
        at = _skip(text, at)
        calls.append(_named(name, value))
    return calls


def _llama3(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    at = _skip(text, 0)
    if text.startswith("<|python_tag|>", at):
        at += len("<|python_tag|>")
    while at < len(text):
        value, at = _json(text, at)
        calls.append(_call(value, "parameters", "arguments"))
        at = _skip(text, at)
        at = _expect(text, at, ";") if at < len(text) else at
    return calls


_DEEPSEEK = {
    name: f"<｜tool▁{name.replace(' ', '▁')}｜>"
    for name in ("calls begin", "calls end", "call begin", "call end", "sep")
}
# The first version writes the kind of call before the name, and fences the arguments.
_DEEPSEEK_NAME = re.compile(
    rf"(?:function{re.escape(_DEEPSEEK['sep'])}([^\n<]+)\n```json\n|([^\n<]+){_DEEPSEEK['sep']})"
)


def _deepseek(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    at = _expect(text, 0, _DEEPSEEK["calls begin"])
    while text.startswith(_DEEPSEEK["call begin"], _skip(text, at)):
        at = _expect(text, at, _DEEPSEEK["call begin"])
        match = _DEEPSEEK_NAME.match(text, at)
        if match is None:
            raise ValueError("a call has no name")
        value, at = _json(text, match.end())
        at = _expect(text, at, "```") if match[1] else at
        at = _expect(text, at, _DEEPSEEK["call end"])
        calls.append(_named(match[1] or match[2], value))
    if _skip(text, _expect(text, at, _DEEPSEEK["calls end"])) < len(text):
        raise ValueError("text follows the calls")
    return calls


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(("<tool_call>", "</tool_call>"), "<tool_call>", _hermes),
    "mistral": ToolFormat(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", _mistral),
    "deepseek": ToolFormat(tuple(_DEEPSEEK.values()), _DEEPSEEK["calls begin"], _deepseek),
    "llama3": ToolFormat(("<|python_tag|>",), "", _llama3),
}
"""In the order in which a chat template is tried; the least strict is last."""
