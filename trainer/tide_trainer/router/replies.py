"""From sampled ids to the assistant message that the agent gets: content, thinking, tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tide_sdk import codec
from tide_trainer import types
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.reply_format import THINK_CLOSE, THINK_OPEN, ReplyFormat
from tide_trainer.router.tool_calls import ToolCall, read_arguments, same_calls, split_calls, write_arguments


@dataclass(frozen=True, slots=True)
class Expected:
    """What the prompt of a turn says of its reply.

    Attributes:
        number: turns that the session captured before; it makes the ids of tool calls unique.
        tools: tool calls are looked for.
        opened: the text with which the prompt itself opens the thinking, such as `<think>` and a newline.
    """

    number: int = 0
    tools: bool = False
    opened: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """What was sampled in a turn, cut at a stop string where one was given.

    Attributes:
        token_ids: [N] sampled ids that count, the stop id included.
        logprobs: [N] log-probs of them.
        text: their text, without the stop string, and without special tokens but those that mark thinking and calls.
        finish_reason: stop, length or tool_calls.
        message: the assistant message that the agent gets for them.
        shown: the same message as the chat template is to see it; None if that is `message`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    message: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, Any] | None = None

    @property
    def has_calls(self) -> bool:
        """True if tool calls were read in it."""
        return self.finish_reason == "tool_calls"


@dataclass(frozen=True, slots=True)
class _Parts:
    """A reply's text in parts.

    Attributes:
        text: all of it.
        before: all in front of the calls, as it was written.
        after: all behind the thinking, the calls too.
        thinking: what stands in the thinking block, None without one.
        content: what is neither thinking nor call.
        calls: the tool calls.
    """

    text: str
    before: str
    after: str
    thinking: str | None
    content: str
    calls: tuple[ToolCall, ...]


def read_reply(renderer: Renderer, expected: Expected, completion: types.Completion, stop: Sequence[str]) -> Reply:
    """The reply of a completion, cut after the token at which the first of `stop` is complete.

    A reply that was cut at its maximal length has no tool calls: what there is of them stays content.

    Raises:
        ValueError: the engine's ids and log-probs do not match. Nothing that a model samples raises.
    """
    ids, logprobs = completion.token_ids, completion.logprobs
    if len(ids) != len(logprobs) or not ids:
        raise ValueError(f"the engine sampled {len(ids)} ids with {len(logprobs)} log-probs")
    keep = renderer.marker_ids(tools=expected.tools)
    text = renderer.decode(ids, keep)
    reason = "length" if completion.finish_reason == "length" else "stop"
    if stop and any(word in text for word in stop):
        low, high = 1, len(ids)  # the shortest beginning that holds a stop string
        while low < high:
            middle = (low + high) // 2
            part = renderer.decode(ids[:middle], keep)
            low, high = (low, middle) if any(word in part for word in stop) else (middle + 1, high)
        ids, logprobs, reason = ids[:low], logprobs[:low], "stop"
        text = renderer.decode(ids, keep)
        text = text[: min(at for word in stop if (at := text.find(word)) >= 0)]
    plain = Reply(ids, logprobs, text, reason, {"role": "assistant", "content": text})
    tools = expected.tools and reason == "stop"
    if not tools and renderer.format.reasoning == "none":
        return plain
    parts = _parts(text, renderer.format, tools=tools, opened=bool(expected.opened))
    if parts.thinking is None and not parts.calls:
        return plain
    message = _message(parts, expected.number)
    shown = _shown(parts, message, expected.opened, renderer.format)
    return Reply(ids, logprobs, text, "tool_calls" if parts.calls else reason, message, shown)


def is_answer(message: Mapping[str, Any], answered: Mapping[str, Any]) -> bool:
    """True if an agent's message is the one that it was answered.

    Arguments compare as JSON, null content is empty content, and thinking may be left out: it is no field of OpenAI's.
    """
    if message.get("role") != "assistant" or _plain(message.get("content")) != _plain(answered["content"]):
        return False
    thinking = message.get("reasoning_content")
    if thinking is not None and thinking != answered.get("reasoning_content", ""):
        return False
    theirs, ours = message.get("tool_calls") or [], answered.get("tool_calls") or []
    if not isinstance(theirs, list) or len(theirs) != len(ours):
        return False
    return all(_is_call(a, b) for a, b in zip(theirs, ours, strict=True))


def same_but_for_json(one: str, other: str, format: ReplyFormat, *, opened: bool) -> bool:
    """True if two texts of a reply with calls differ only in the JSON of the calls and in spaces beside them."""
    a, b = (_parts(text, format, tools=True, opened=opened) for text in (one, other))
    return bool(a.calls) and a.before.rstrip() == b.before.rstrip() and same_calls(a.calls, b.calls)


def opened_thinking(prompt: str) -> str:
    """The end of a prompt that opens the thinking, empty if it does not."""
    end = prompt[-64:]
    return end[end.rindex(THINK_OPEN) :] if end.rstrip().endswith(THINK_OPEN) else ""


def _parts(text: str, format: ReplyFormat, *, tools: bool, opened: bool) -> _Parts:
    start, at = (0 if opened else _after_opening(text)) if format.reasoning == "think" else -1, 0
    thinking = None
    if start >= 0:
        end = text.find(THINK_CLOSE, start)
        thinking = text[start : end if end >= 0 else len(text)]
        at = end + len(THINK_CLOSE) if end >= 0 else len(text)
    rest, calls = text[at:], ()
    if tools and format.tools != "none":
        rest, calls = split_calls(rest, format.tools)
        if len(calls) > format.max_calls:
            rest, calls = text[at:], ()
    content = rest if thinking is None else rest.lstrip("\n")
    if calls:
        content = content.rstrip()
    return _Parts(text, text[:at] + rest, text[at:], thinking, content, calls)


def _after_opening(text: str) -> int:
    start = len(text) - len(text.lstrip())
    return start + len(THINK_OPEN) if text.startswith(THINK_OPEN, start) else -1


def _message(parts: _Parts, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parts.content}
    if parts.thinking is not None and (thinking := parts.thinking.strip("\n")):
        message["reasoning_content"] = thinking
    if parts.calls:
        message["content"] = parts.content or None
        message["tool_calls"] = [
            {
                # Nine letters and digits: Mistral's templates take nothing else.
                "id": f"c{number:06d}{place:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": write_arguments(call.arguments)},
            }
            for place, call in enumerate(parts.calls)
        ]
    return message


def _shown(parts: _Parts, message: Mapping[str, Any], opened: str, format: ReplyFormat) -> dict[str, Any]:
    """The message for the template: what it has no field for stays in the content."""
    shown = dict(message)
    told = bool(parts.calls) and format.shown_calls > 0
    if not told:
        shown.pop("tool_calls", None)
        shown["content"] = parts.after if parts.thinking is None else parts.after.lstrip("\n")
    if parts.thinking is not None and format.reads_reasoning:
        shown.setdefault("reasoning_content", "")
    elif parts.thinking is not None:
        shown.pop("reasoning_content", None)
        shown["content"] = opened + (parts.before.rstrip() if told else parts.text)
    return shown


def _plain(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text")) for part in content)
    return content


def _is_call(theirs: Any, ours: Mapping[str, Any]) -> bool:
    function = theirs.get("function") if isinstance(theirs, dict) else None
    if not isinstance(function, dict) or theirs.get("id") != ours["id"]:
        return False
    arguments, expected = function.get("arguments"), ours["function"]["arguments"]
    if function.get("name") != ours["function"]["name"]:
        return False
    try:
        given = read_arguments(arguments) if isinstance(arguments, str) else arguments
        return codec.same(given, read_arguments(expected))
    except ValueError:
        return False
