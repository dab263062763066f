"""What a person types: pure reading of commands and of tool calls."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

HELP = """\
Type a message and press Enter to take the next turn. A line of three double quotes (\"\"\") begins a message of several
lines, another one ends it. A message that begins with a slash is typed with two.

  /tool NAME a=1 b="two words"   call a tool; values as the tool's schema says, or JSON
  /tool NAME {"a": 1}            the same with the arguments as a JSON object
  /tools                         the tools again, with their arguments
  /json {...}                    take the turn with a whole assistant message
  /history                       the conversation so far
  /clocks                        the task's clocks, as they were at the last answer
  /pause, /resume                stop the task's clocks, and let them go on
  /end                           end the task (Ctrl-D and Ctrl-C do the same)
  /help                          this"""
COMMANDS = frozenset({"tool", "tools", "json", "history", "clocks", "pause", "resume", "end", "help"})
QUOTES = '"""'


class Typo(ValueError):
    """What was typed means nothing; the message says what to type."""


@dataclass(frozen=True, slots=True)
class Command:
    """A line that begins with a slash.

    Attributes:
        name: without the slash.
        rest: what follows it.
    """

    name: str
    rest: str


def read_line(line: str) -> Command | str:
    """A command, or the words of a message.

    Raises:
        Typo: there is no such command.
    """
    if line.startswith("//"):
        return line[1:]
    if not line.startswith("/"):
        return line
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        raise Typo(f"there is no /{name}; /help lists what there is, and // begins a message with a slash")
    return Command(name, rest.strip())


def words(text: str) -> dict[str, Any]:
    """The message of plain words."""
    return {"role": "assistant", "content": text}


def whole_message(text: str) -> dict[str, Any]:
    """The message that `/json` gives.

    Raises:
        Typo: it is no JSON object.
    """
    return {"role": "assistant", **_object(text, '/json wants a JSON object, such as {"content": "hello"}')}


def tool_call(text: str, tools: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """The message that `/tool` gives.

    Args:
        text: what follows `/tool`.
        tools: OpenAI definitions of what the environment offers.
        number: of the call in this task, for its id.

    Raises:
        Typo: there is no such tool, or the arguments cannot be read.
    """
    name, _, rest = text.partition(" ")
    known = {str(function["name"]): function for function in map(function_of, tools) if "name" in function}
    if name not in known:
        raise Typo(f"there is no tool {name!r}; the environment offers {', '.join(sorted(known)) or 'none'}")
    rest = rest.strip()
    given = _object(rest, "the arguments are no JSON object") if rest.startswith("{") else _pairs(rest, known[name])
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool's definition; empty where it is none."""
    function: Any = tool.get("function")
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The schemas of a function's arguments by name; empty where it tells none."""
    schema: Any = function.get("parameters")
    found: Any = cast("Mapping[str, Any]", schema).get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    items = cast("Mapping[str, Any]", found).items()
    return {name: cast("Mapping[str, Any]", one) if isinstance(one, Mapping) else {} for name, one in items}


def _pairs(text: str, function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        split = shlex.split(text)
    except ValueError as error:
        raise Typo(f"the arguments cannot be read: {error}") from error
    schemas = parameters_of(function)
    given: dict[str, Any] = {}
    for word in split:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise Typo(f"{word!r}: give arguments as name=value, or all of them as one JSON object")
        if schemas and name not in schemas:
            raise Typo(f"{function['name']} takes {', '.join(schemas)}, not {name!r}")
        given[name] = _value(value, schemas.get(name, {}))
    return given


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _object(text: str, otherwise: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Typo(f"{otherwise}: {error}") from error
    if not isinstance(found, dict):
        raise Typo(otherwise)
    return cast("dict[str, Any]", found)
