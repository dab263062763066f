"""What OpenAI's endpoints share here: errors in OpenAI's form, a call's options, and an answered call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tide_sdk import codec

TokenText = Callable[[int], str]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What a request of any endpoint may ask for, checked.

    Attributes:
        max_new_tokens: None takes the session's.
        temperature: None takes the session's.
        stop: texts that end the answer and are no part of it.
        logprobs: the sampled tokens' log-probs are answered too.
        token_ids: the prompt's and the sampled token ids are answered too.
        ignored: fields that change nothing here.
    """

    max_new_tokens: int | None
    temperature: float | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ModelRequest):
    """A chat completion request.

    Attributes:
        messages: plain dicts without fields that are None (except `content`).
        tools: tool schemas for the template, None without.
        read_calls: the reply may call tools; False for tool_choice none.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    read_calls: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ModelRequest):
    """A request of the older completions endpoint.

    Attributes:
        prompt: raw text, or [T] token ids.
    """

    prompt: str | list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered call.

    Attributes:
        message: the assistant's message, for chat completions.
        text: the sampled text as it is, for completions.
        finish_reason: stop, length or tool_calls.
        token_ids: [N] sampled ids.
        logprobs: [N] their log-probs.
        prompt_ids: [T] what the engine was given, empty where it was not asked for.
        version: model version that sampled, negative if unknown.
    """

    call: str
    model: str
    created: int
    message: Mapping[str, Any]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_ids: Sequence[int]
    version: int


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """The 400 that names a field."""
    return ApiError(400, code, message, param=param)


def now_s() -> int:
    """Seconds since the epoch, for `created`."""
    return int(time.time())
