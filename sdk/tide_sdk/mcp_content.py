"""What an MCP server lists and answers, as OpenAI tools and tool results; plain data in, plain data out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tide_sdk.tool_calls import MAX_NAME_CHARS, ToolResult

MAX_IMAGE_BASE64_CHARS = 12 * 1024 * 1024
"""Characters of one image; a larger one is left out with a word."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


def openai_names(names: Sequence[str]) -> dict[str, str]:
    """OpenAI's name of each tool -> the server's; those that would collide are numbered in the order of the list."""
    found: dict[str, str] = {}
    for name in names:
        base = _NOT_IN_NAMES.sub("_", name)[:MAX_NAME_CHARS] or "tool"
        chosen, number = base, 1
        while chosen in found:
            number += 1
            ending = f"_{number}"
            chosen = base[: MAX_NAME_CHARS - len(ending)] + ending
        found[chosen] = name
    return found


def tool_result(answer: Any) -> ToolResult:
    """An MCP `CallToolResult` for the model: texts in order, images apart, the rest as words.

    Structured content is shown only where there is no text, since servers give it as text too.
    """
    texts: list[str] = []
    images: list[str] = []
    for block in answer.content:
        text, image = _block(block)
        if text:
            texts.append(text)
        if image:
            images.append(image)
    content: Any = "\n".join(texts)
    if not texts and answer.structured_content is not None:
        content = answer.structured_content
    elif not texts:
        content = None if not answer.is_error else "the tool failed and said nothing"
    return ToolResult(content, images, error=bool(answer.is_error))


def reward_of(answer: Any) -> float:
    """The number that a scoring tool answered: structured content, its member `reward` or `result`, or the text alone.

    Raises:
        ValueError: there is none, or the tool told an error.
    """
    said = " ".join(str(getattr(block, "text", "")) for block in answer.content).strip()
    if answer.is_error:
        raise ValueError(f"the scoring tool told an error: {said[:200]}")
    value: Any = answer.structured_content
    while isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        value = members.get("reward", members.get("result"))
    if value is None:
        value = said
    if isinstance(value, (str, int, float)):
        try:
            return float(value)
        except ValueError:
            pass
    raise ValueError(f"the scoring tool gave no number: {said[:200]!r}")


def _block(block: Any) -> tuple[str, str]:
    """(text, image URL) of one content block."""
    if block.type == "text":
        return block.text, ""
    if block.type in ("image", "audio"):
        return _binary(block.type, block.mime_type, block.data)
    if block.type == "resource_link":
        return " ".join(filter(None, (block.name, block.uri, block.description))), ""
    if block.type == "resource":
        resource = block.resource
        text = getattr(resource, "text", None)
        if text is not None:
            return f"{resource.uri}:\n{text}", ""
        return _binary(str(resource.uri), resource.mime_type or "", resource.blob)
    return f"[a {block.type} block is left out]", ""


def _binary(what: str, mime_type: str, data: str) -> tuple[str, str]:
    if mime_type in IMAGE_TYPES and len(data) <= MAX_IMAGE_BASE64_CHARS:
        return "", f"data:{mime_type};base64,{data}"
    return f"[{what}: {mime_type or 'binary'}, {len(data) * 3 // 4} bytes, left out]", ""
