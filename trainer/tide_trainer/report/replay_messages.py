"""Chat messages laid out for a page: words, reasoning, tool calls with their results, images; bounded. Pure but for
the images, which a function hands in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TEXT = 20_000
MAX_ALL_TEXT = 3_000_000
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PageImage:
    """An image of the page.

    Attributes:
        source: its data URL; empty where it stands elsewhere on the page, or nowhere.
        anchor: the id of the place where it stands.
        problem: why it is not shown; empty if it is.
    """

    digest: str
    source: str
    anchor: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` are (name, value) where they are JSON, else one value without a name."""

    name: str
    arguments: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MessageView:
    """One message.

    Attributes:
        heading: its role, and for a tool's result the name of the tool.
        reasoning: shown folded.
        extra: other fields of the message, (name, value).
    """

    role: str
    heading: str
    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    images: tuple[PageImage, ...]
    extra: tuple[tuple[str, str], ...]


class MessagePages:
    """Lays out the messages of one trajectory, in order.

    Args:
        image: the page's image of a digest, or of an error's words where there is no digest.
    """

    def __init__(self, image: Callable[[str, str], PageImage]) -> None:
        self._image = image
        self._names: dict[str, str] = {}
        self._room = MAX_ALL_TEXT
        self.num_cut = 0

    def views(self, messages: Sequence[Mapping[str, Any]]) -> list[MessageView]:
        """Some messages."""
        return [self.view(message) for message in messages]

    def view(self, message: Mapping[str, Any]) -> MessageView:
        """One message."""
        role = str(message.get("role") or "unknown")[:40]
        text, images = self._content(message.get("content"))
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        thought = _THINK.match(text) if role == "assistant" and not reasoning else None
        if thought is not None:
            reasoning, text = thought.group(1), text[thought.end() :]
        known = {"role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name"}
        return MessageView(
            role=role,
            heading=self._heading(role, message),
            text=self._cut(text),
            reasoning=self._cut(reasoning if isinstance(reasoning, str) else _written(reasoning)),
            calls=self._calls(message.get("tool_calls")),
            images=tuple(images),
            extra=tuple(
                (self._cut(str(key)), self._cut(_written(value)))
                for key, value in message.items()
                if key not in known and value not in (None, "", [], {})
            ),
        )

    def _heading(self, role: str, message: Mapping[str, Any]) -> str:
        name = str(message.get("name") or self._names.get(str(message.get("tool_call_id")), ""))[:100]
        if role == "tool":
            return f"tool result of {name}" if name else "tool result"
        return f"{role} ({name})" if name else role

    def _content(self, content: Any) -> tuple[str, list[PageImage]]:
        if content is None or isinstance(content, str):
            return content or "", []
        parts: list[str] = []
        images: list[PageImage] = []
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "image":
                images.append(self._image(str(part.get("digest") or ""), str(part.get("error") or "no image was kept")))
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts.append(part["text"])
            else:
                parts.append(_written(part))
        return "\n".join(parts), images

    def _calls(self, calls: Any) -> tuple[ToolCall, ...]:
        found: list[ToolCall] = []
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                continue
            name = str(function.get("name") or "unnamed")[:100]
            self._names[str(call.get("id"))] = name
            found.append(ToolCall(name, self._arguments(function.get("arguments"))))
        return tuple(found)

    def _arguments(self, arguments: Any) -> tuple[tuple[str, str], ...]:
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                return (("", self._cut(arguments)),)
        if not isinstance(arguments, Mapping):
            return (("", self._cut(_written(arguments))),)
        return tuple((self._cut(str(key)), self._cut(_written(value))) for key, value in arguments.items())

    def _cut(self, text: str) -> str:
        limit = max(0, min(MAX_TEXT, self._room))
        self._room -= min(len(text), limit)
        if len(text) <= limit:
            return text
        self.num_cut += 1
        return f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, indent=1)
    except RecursionError:
        return "(nested too deeply to be shown)"
