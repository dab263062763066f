"""OpenAI's requests, read with errors that name the field and the fix.

Refused, because the captured log-probs would not be those of the distribution that was sampled: `top_p`, `top_k`,
penalties, `logit_bias`, a forced tool choice, guided decoding, and what else asks for tokens that are not the policy's.
What changes nothing here is ignored and named in the answer's `tide-ignored` header, unknown fields too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tide_sdk.images import url_of
from tide_trainer.router.openai_wire import ChatRequest, CompletionRequest, invalid

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_PARTS = 1024
MAX_STOP = 4
MAX_STOP_CHARS = 1024
MAX_NAMED = 32
MAX_NAME_CHARS = 64
"""Ignored fields that are named, and their longest name; the rest are left out of the header."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# name -> values that change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
_NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (0,),
}
_COMMON = frozenset(
    {
        "model",
        "max_tokens",
        "temperature",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "return_token_ids",
        *_NEUTRAL,
    }
)
_CHAT = _COMMON | {"messages", "tools", "max_completion_tokens", *_NEUTRAL_CHAT}
_COMPLETION = _COMMON | {"prompt", *_NEUTRAL_COMPLETION}


def read_chat(data: Any) -> ChatRequest:
    """Check the parsed body of a chat completion. Raises ApiError 400 that names the field and the fix."""
    body = _object(data, _NEUTRAL_CHAT)
    options = _options(body, _CHAT, ("max_completion_tokens", "max_tokens"))
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=_tools(body.get("tools")),
        read_calls=body.get("tool_choice") != "none",
        logprobs=_flag(body, "logprobs"),
        **options,
    )


def read_completion(data: Any) -> CompletionRequest:
    """Check the parsed body of a completion. Raises ApiError 400 that names the field and the fix."""
    body = _object(data, _NEUTRAL_COMPLETION)
    options = _options(body, _COMPLETION, ("max_tokens",))
    return CompletionRequest(
        prompt=_prompt(body.get("prompt")),
        logprobs=body.get("logprobs") is not None and body.get("logprobs") is not False,
        **options,
    )


def _object(data: Any, neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise invalid("body", "the body must be a JSON object")
    for name, values in (*_NEUTRAL.items(), *neutral.items()):
        value = data.get(name)
        if value is not None and value not in values:
            fix = f"leave it out or use {values[0]!r}" if values else "leave it out"
            raise invalid(name, f"{name} = {_shown(value)} is not supported here; {fix}")
    return data


def _options(body: Mapping[str, Any], known: Collection[str], limits: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `ModelRequest`, without `logprobs`."""
    limit = next((body[name] for name in limits if body.get(name) is not None), None)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise invalid("max_tokens", "max_tokens must be a whole number of at least 1")
    temperature = body.get("temperature")
    if temperature is not None and not (
        isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and 0 <= temperature <= 2
    ):
        raise invalid("temperature", "temperature must be a number from 0 to 2")
    stream_options = body.get("stream_options")
    if stream_options is not None and not isinstance(stream_options, dict):
        raise invalid("stream_options", "stream_options must be an object")
    unknown = (name for name, value in body.items() if name not in known and value is not None)
    return {
        "max_new_tokens": limit,
        "temperature": None if temperature is None else float(temperature),
        "stop": _stop(body.get("stop")),
        "stream": _flag(body, "stream"),
        "include_usage": bool(stream_options) and _flag(stream_options, "include_usage"),
        "token_ids": _flag(body, "return_token_ids"),
        "ignored": tuple(sorted(name for name in unknown if _goes_into_a_header(name)))[:MAX_NAMED],
    }


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"{name} must be true or false")
    return value is True


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise invalid("messages", "messages must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise invalid("messages", f"more than {MAX_MESSAGES} messages")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if type(role) is str and role in _ROLES and len(message) == 2 and type(message.get("content")) is str:
            messages.append(message)  # nearly all are such, and a conversation comes whole with each call
            continue
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(f"messages[{index}].role", f"messages[{index}] needs a role out of {sorted(_ROLES)}")
        clean = {name: field for name, field in message.items() if field is not None}
        clean["content"] = _content(message.get("content"), index)
        if "tool_calls" in clean:
            _check_tool_calls(clean["tool_calls"], index)
        messages.append(clean)
    return messages


def _content(content: Any, index: int) -> str | list[dict[str, Any]] | None:
    """The text of a message, or its parts where there are images among them."""
    if content is None or isinstance(content, str):
        return content
    field = f"messages[{index}].content"
    if not isinstance(content, list):
        raise invalid(field, f"{field} must be text or a list of parts")
    if len(content) > MAX_PARTS:
        raise invalid(field, f"{field}: more than {MAX_PARTS} parts")
    for place, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            continue
        url = url_of(part)
        if url is None:
            raise invalid(field, f"{field}: only parts of type text and image_url are supported here")
        if not url.startswith(("data:", "tide-blob:")):
            words = "images are not fetched from elsewhere; send a data URL, or give the image and refer to it"
            raise invalid(field, f"{field}[{place}].image_url.url: {words}")
    if any(part["type"] == "image_url" for part in content):
        return content
    # Most templates take text alone; a line each keeps parts apart.
    return "\n".join(part["text"] for part in content)


def _check_tool_calls(calls: Any, index: int) -> None:
    field = f"messages[{index}].tool_calls"
    if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
        raise invalid(field, f"{field} must be a list of at most {MAX_TOOLS} calls")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments", ""), str)
        ):
            raise invalid(field, f"{field}: each needs a function with a name, and arguments as JSON text")


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid("tools", f"tools must be a list of at most {MAX_TOOLS} function schemas")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise invalid("tools", f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}')
    return value


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        if all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in value):
            return value
        if len(value) > 1 and all(isinstance(one, (str, list)) for one in value):
            raise invalid("prompt", f"{len(value)} prompts in one call are not supported here; make a call for each")
    raise invalid("prompt", "prompt must be text, or a list of token ids, and not empty")


def _stop(value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value or []
    if not isinstance(words, list) or len(words) > MAX_STOP or not all(isinstance(w, str) and w for w in words):
        raise invalid("stop", f"stop must be a text or a list of at most {MAX_STOP} texts that are not empty")
    if any(len(word) > MAX_STOP_CHARS for word in words):
        raise invalid("stop", f"a text of stop has more than {MAX_STOP_CHARS} characters")
    return tuple(words)


def _goes_into_a_header(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARS and name.isascii() and name.isidentifier()


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):  # it may be deeper than Python can show
        return "this object" if isinstance(value, dict) else "this list"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
