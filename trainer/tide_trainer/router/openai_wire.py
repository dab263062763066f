"""OpenAI's chat completions on the wire: requests read with clear errors, answers and errors written.

Refused, because the captured log-probs would not be those of the distribution that was sampled: `top_p`, penalties,
`logit_bias`. Ignored and named in the `tide-ignored` header: `seed` (a seed per request can kill the CPU engine).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tide_sdk import codec

MAX_MESSAGES = 4096
MAX_STOP = 4
TokenText = Callable[[int], str]
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# name -> values that change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
}


class ApiError(Exception):
    """An answer with an OpenAI-style error body."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.kind = kind

    def body(self) -> bytes:
        """The JSON body."""
        return codec.dumps(
            {"error": {"message": self.message, "type": self.kind, "code": self.code, "param": self.param}}
        )


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion request, checked.

    Attributes:
        messages: plain dicts without fields that are None (except `content`).
        tools: tool schemas for the template, None without.
        read_calls: the reply may call tools; False for tool_choice none.
        max_new_tokens: None takes the session's.
        temperature: None takes the session's.
        ignored: fields that were ignored.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    read_calls: bool
    max_new_tokens: int | None
    temperature: float | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered call: the assistant's message, and the sampled ids [N] with their log-probs."""

    call: str
    model: str
    created: int
    message: Mapping[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def read_request(data: Any) -> ChatRequest:
    """Check a parsed body. Raises ApiError 400 that names the field and the fix."""
    if not isinstance(data, dict):
        raise _invalid("body", "the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        value = data.get(name)
        if value is not None and value not in neutral:
            raise _invalid(name, f"{name} = {value!r} is not supported here; leave it out or use {neutral[0]!r}")
    options = data.get("stream_options")
    limit = data.get("max_completion_tokens")
    limit = data.get("max_tokens") if limit is None else limit
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise _invalid("max_tokens", "max_tokens must be a whole number of at least 1")
    temperature = data.get("temperature")
    if temperature is not None and not (
        isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and 0 <= temperature <= 2
    ):
        raise _invalid("temperature", "temperature must be a number from 0 to 2")
    return ChatRequest(
        messages=_messages(data.get("messages")),
        tools=_tools(data.get("tools")),
        read_calls=data.get("tool_choice") != "none",
        max_new_tokens=limit,
        temperature=None if temperature is None else float(temperature),
        stop=_stop(data.get("stop")),
        stream=data.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=data.get("logprobs") is True,
        ignored=("seed",) if data.get("seed") is not None else (),
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "messages must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise _invalid("messages", f"more than {MAX_MESSAGES} messages")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise _invalid(f"messages[{index}].role", f"messages[{index}] needs a role out of {sorted(_ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(content, index)
        elif content is not None and not isinstance(content, str):
            raise _invalid(f"messages[{index}].content", f"messages[{index}].content must be text or a list of parts")
        clean = {name: field for name, field in message.items() if field is not None}
        clean.setdefault("content", None)
        messages.append(clean)
    return messages


def _check_parts(parts: list[Any], index: int) -> None:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type") != "text":
            raise _invalid(
                f"messages[{index}].content", f"messages[{index}].content: only parts of type text are supported here"
            )


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _invalid("tools", "tools must be a list of function schemas")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value or []
    if not isinstance(words, list) or len(words) > MAX_STOP or not all(isinstance(w, str) and w for w in words):
        raise _invalid("stop", f"stop must be a text or a list of at most {MAX_STOP} texts that are not empty")
    return tuple(words)


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)


def write_answer(answer: Answer, token_text: TokenText | None = None) -> bytes:
    """A whole chat completion; log-probs are written if `token_text` gives the text of an id."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
    }
    if token_text is not None:
        choice["logprobs"] = _logprobs(answer, token_text)
    body = {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
    return codec.dumps(body)


def write_stream(answer: Answer, token_text: TokenText | None = None, *, include_usage: bool = False) -> bytes:
    """The same as server-sent events: one chunk with the whole text, one with the finish reason."""
    head = _head(answer, "chat.completion.chunk")
    first: dict[str, Any] = {"index": 0, "delta": answer.message}
    if token_text is not None:
        first["logprobs"] = _logprobs(answer, token_text)
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [first | {"finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]},
    ]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(answer)})
    return b"".join(b"data: " + codec.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def write_models(model: str, created: int, max_context_tokens: int) -> bytes:
    """The list of models: the one that is served."""
    entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "tide",
        "max_model_len": max_context_tokens,
    }
    return codec.dumps({"object": "list", "data": [entry]})


def now_s() -> int:
    """Seconds since the epoch, for `created`."""
    return int(time.time())


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.call}", "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: Answer) -> Mapping[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _logprobs(answer: Answer, token_text: TokenText) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for token_id, value in zip(answer.token_ids, answer.logprobs, strict=True):
        text = token_text(token_id)
        content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content}
