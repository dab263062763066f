"""How the model of a chat template writes thinking and tool calls, found by showing the template a call.

The format of calls is the one whose parser reads what the template writes; so a template that only resembles another
one is not mistaken for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tide_trainer.errors import ConfigurationError
from tide_trainer.router.tool_calls import (
    FORMATS,
    MAX_CALLS,
    ToolCall,
    read_arguments,
    same_calls,
    split_calls,
    write_arguments,
)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
REASONING_FORMATS = ("auto", "think", "none")
TOOL_FORMATS = ("auto", *FORMATS, "none")
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], "str | None"]
"""(messages, tools, add_generation_prompt) -> the text, None if the template refuses them."""

_USER = {"role": "user", "content": "Go."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "go_there",
        "description": "Go.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}
_CALLS = tuple(ToolCall("go_there", {"where": where, "steps": [1]}) for where in ("left", "right"))


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """What a reply may hold, and what the template makes of it.

    Attributes:
        tools: a key of `tool_calls.FORMATS`, or none.
        reasoning: think, or none.
        reads_reasoning: the template takes `reasoning_content`; else thinking stays in the content that it is shown.
        shown_calls: calls of one message that the template writes; 0: it knows none, so they are shown as content.
        arguments_text: the template takes arguments as JSON text, not as an object.
        null_content: the template takes a message with calls whose content is null.
    """

    tools: str = "none"
    reasoning: str = "none"
    reads_reasoning: bool = False
    shown_calls: int = 0
    arguments_text: bool = False
    null_content: bool = True

    @property
    def max_calls(self) -> int:
        """Calls of one reply that can be told to the agent and shown again."""
        return self.shown_calls or MAX_CALLS


def detect_format(
    render: Render, template: str, stop_texts: Sequence[str], tools: str = "auto", reasoning: str = "auto"
) -> ReplyFormat:
    """The format of a chat template's model.

    Args:
        render: renders messages whose arguments and content are as the template wants them.
        template: the template's text.
        stop_texts: texts that end a reply.
        tools: one of `TOOL_FORMATS`.
        reasoning: one of `REASONING_FORMATS`.

    Raises:
        ConfigurationError: a format is unknown.
    """
    if tools not in TOOL_FORMATS:
        raise ConfigurationError("model.tool_format", f"{tools!r} is none of {', '.join(TOOL_FORMATS)}")
    if reasoning not in REASONING_FORMATS:
        raise ConfigurationError("model.reasoning_format", f"{reasoning!r} is none of {', '.join(REASONING_FORMATS)}")
    if reasoning == "auto":
        reasoning = "think" if THINK_CLOSE in template else "none"
    reads = "reasoning_content" in template
    candidates = {"auto": tuple(FORMATS), "none": ()}.get(tools, (tools,))
    for arguments_text in (False, True):
        for null_content in (True, False):
            bodies = [_body(render, stop_texts, num, arguments_text, null_content) for num in (1, 2)]
            for name in candidates:
                if _reads(name, bodies[0], 1):
                    most = MAX_CALLS if _reads(name, bodies[1], 2) else 1
                    return ReplyFormat(name, reasoning, reads, most, arguments_text, null_content)
    return ReplyFormat("none" if tools == "auto" else tools, reasoning, reads)


def shown_messages(messages: Sequence[Mapping[str, Any]], format: ReplyFormat) -> list[Mapping[str, Any]]:
    """Messages as the template wants them: arguments as objects or as text, null content only where it is taken."""
    return [_shown(message, format) for message in messages]


def _shown(message: Mapping[str, Any], format: ReplyFormat) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:  # of anything else the template says what it thinks
        message = {**message, "tool_calls": [_shown_call(call, format) for call in calls]}
    if message.get("content") is None and not (calls and format.null_content):
        message = {**message, "content": ""}
    return message


def _shown_call(call: Any, format: ReplyFormat) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, dict) and format.arguments_text:
        arguments = write_arguments(arguments)
    elif isinstance(arguments, str) and not format.arguments_text:
        try:
            arguments = read_arguments(arguments)
        except ValueError:
            return call  # an agent may show what was no JSON
    return {**call, "function": {**function, "arguments": arguments}}


def _body(render: Render, stop_texts: Sequence[str], num: int, arguments_text: bool, null_content: bool) -> str | None:
    """What the template writes for a message with `num` calls, with the head of the message if it must be."""
    calls = [
        {
            "id": f"c{place:08d}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": write_arguments(call.arguments) if arguments_text else call.arguments,
            },
        }
        for place, call in enumerate(_CALLS[:num])
    ]
    message = {"role": "assistant", "content": None if null_content else "", "tool_calls": calls}
    text = render([_USER, message], [_TOOL], False)
    if text is None:
        return None
    for prompt in (render([_USER], [_TOOL], True), render([_USER], [_TOOL], False)):
        if prompt is not None and text.startswith(prompt):
            body = text[len(prompt) :]
            return body[: min((at for stop in stop_texts if stop and (at := body.find(stop)) >= 0), default=len(body))]
    return None


def _reads(name: str, body: str | None, num: int) -> bool:
    if body is None:
        return False
    before, calls = split_calls(body, name)
    return "None" not in before and same_calls(calls, _CALLS[:num])
