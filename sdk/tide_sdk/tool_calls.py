"""The tool calls of one assistant message: read, run in order, each answered with a `tool` message.

    message.tool_calls -> read_call -> run (the author's tool) -> ToolResult -> tool messages, then the images -> Step

A bad call is the model's mistake and is told to the model; only what is broken raises.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import to_json

from tide_sdk import codec
from tide_sdk.environment import Step
from tide_sdk.errors import told

NOT_RUN = "not_run"
"""What calls after the end of the task are answered."""
MAX_ID_CHARS = 512
MAX_NAME_CHARS = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SHOWN_NAME_CHARS = 100


class ToolError(Exception):
    """A mistake to tell the model, raised by a tool: the call is answered `error: ...` and the task goes on."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool gives where a text or plain data does not say enough.

    Attributes:
        content: a text, or data that is shown as JSON; None is shown as `ok`.
        images: image URLs, `data:` ones as a rule; they follow in a user message, since OpenAI's tool messages hold
            text only.
        reward: this call's reward; those of one message are added up.
        terminated: the task reached its end; the calls after this one are not run.
        truncated: the task was cut short; the calls after this one are not run.
        error: the content tells a mistake; it is shown as `error: ...`.
        info: plain JSON data for people and metrics, never shown to the model.
    """

    content: Any = None
    images: Sequence[str] = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    error: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


RunTool = Callable[[str, dict[str, Any]], Awaitable[ToolResult]]


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """What one message may ask for and be told.

    Attributes:
        max_calls: calls that are run; the rest are answered with an error.
        max_result_chars: characters of one result; a longer one is cut and says so.
        max_images: images of one message's results together; the rest are left out with a word.
    """

    max_calls: int = 32
    max_result_chars: int = 50_000
    max_images: int = 16


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it; `problem` is what is wrong with it, empty if nothing is."""

    id: str | None
    name: str
    arguments: dict[str, Any]
    problem: str = ""


def read_call(raw: Mapping[str, Any]) -> ToolCall:
    """Read a call of an assistant message; never raises, since a model may write anything."""
    call_id = raw.get("id")
    if not isinstance(call_id, str) or len(call_id) > MAX_ID_CHARS:
        call_id = None
    function = raw.get("function")
    if not isinstance(function, Mapping):
        return ToolCall(call_id, "", {}, "the call has no function; give {name, arguments}")
    given = cast("Mapping[str, Any]", function)
    name, arguments = given.get("name"), given.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", {}, "the call names no function")
    if arguments is None or arguments == "":
        return ToolCall(call_id, name, {})
    if isinstance(arguments, str):
        try:
            arguments = codec.loads(arguments)
        except codec.CodecError as error:
            return ToolCall(call_id, name, {}, f"the arguments of {shown(name)} cannot be read: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(call_id, name, {}, f"the arguments of {shown(name)} must be a JSON object")
    return ToolCall(call_id, name, cast("dict[str, Any]", arguments))


async def run_calls(calls: Sequence[Mapping[str, Any]], run: RunTool, limits: ToolLimits) -> Step:
    """Run the calls of one message in order, until one ends the task.

    Args:
        calls: the message's `tool_calls`.
        run: runs one call by name and arguments; raises `ToolError` for what the model did wrong.
        limits: bounds on the calls and on what they are answered.

    Raises:
        RuntimeError: a tool raised something else; names the tool.
    """
    messages: list[dict[str, Any]] = []
    images: list[tuple[str, str]] = []
    rewards: list[float] = []
    info: dict[str, Any] = {}
    num_run = num_errors = 0
    terminated = truncated = False
    for index, raw in enumerate(calls):
        call = read_call(raw)
        if terminated or truncated:
            messages.append(_answer(call, NOT_RUN))
            continue
        if index >= limits.max_calls:
            result = ToolResult(f"at most {limits.max_calls} calls in one message; this one was not run", error=True)
        else:
            result = await _run(call, run)
            num_run += not call.problem
        num_errors += result.error
        messages.append(_answer(call, _text(result, limits.max_result_chars)))
        images.extend((call.name, url) for url in result.images)
        info.update(result.info)
        if result.reward is not None:
            rewards.append(result.reward)
        terminated, truncated = result.terminated, result.truncated
    if images:
        messages.append(_shown_images(images, limits.max_images))
    info |= {"tool_calls": num_run, "tool_errors": num_errors}
    return Step(messages, sum(rewards) if rewards else None, terminated, truncated, info)


async def _run(call: ToolCall, run: RunTool) -> ToolResult:
    if call.problem:
        return ToolResult(call.problem, error=True)
    try:
        return await run(call.name, call.arguments)
    except ToolError as error:
        return ToolResult(str(error), error=True)
    except Exception as error:
        raise RuntimeError(f"tool {call.name}: {told(error)}") from error


def as_result(value: Any) -> ToolResult:
    """What a tool returned, as a `ToolResult`."""
    return value if isinstance(value, ToolResult) else ToolResult(value)


def definition(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI tool definition; `parameters` is the JSON Schema of the arguments, an object."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def is_tool_name(name: str) -> bool:
    """True if OpenAI takes it for a function's name."""
    return _NAME.fullmatch(name) is not None


def unknown_tool(name: str, known: Sequence[str]) -> ToolError:
    """The error for a call of a tool that is not there."""
    return ToolError(f"there is no tool {shown(name)}; there are: {', '.join(known) or 'none'}")


def shown(name: str) -> str:
    """A name that the model made up, bounded."""
    return repr(name if len(name) <= _SHOWN_NAME_CHARS else name[:_SHOWN_NAME_CHARS] + "...")


def _answer(call: ToolCall, text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "tool", "content": text}
    return message if call.id is None else message | {"tool_call_id": call.id}


def _text(result: ToolResult, max_chars: int) -> str:
    content = result.content
    if content is None:
        text = "ok"
    elif isinstance(content, str):
        # A file's name or a program's output may hold what UTF-8 cannot carry.
        text = content.encode("utf-8", "replace").decode()
    else:
        text = to_json(content, fallback=str, inf_nan_mode="strings").decode()
    text = f"error: {text}" if result.error else text
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {len(text)} characters, {max_chars} are shown]"


def _shown_images(images: Sequence[tuple[str, str]], max_images: int) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for name, url in images[:max_images]:
        parts.append({"type": "text", "text": f"Image from {name}:"})
        parts.append({"type": "image_url", "image_url": {"url": url}})
    if len(images) > max_images:
        parts.append({"type": "text", "text": f"[{len(images) - max_images} more images are left out]"})
    return {"role": "user", "content": parts}
