"""What a model server's error answer means, for any server that speaks OpenAI's API: pure decisions.

| answer | raised | outcome |
| --- | --- | --- |
| the messages do not fit the context, in whatever words | `ContextOverflow` | context_overflow |
| a content filter or a policy holds the request or the answer back | `ModelRefused` | model_refused |
| 410 | `ModelStopped` | aborted |
| 400, 413, 422: the request is wrong | `RequestInvalid` | agent_error |
| anything else: no rights, no such model, busy, broken | `TransportError`, `TideError` (401) | infrastructure |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.http_connection import TransportError

MAX_WORDS = 1000
_INVALID_STATUS = frozenset({400, 413, 422})
_OVERFLOW_CODES = frozenset(
    {
        "context_length_exceeded",  # OpenAI, the trainer's router
        "context_window_exceeded",
        "exceed_context_size_error",  # llama.cpp, in `type`
        "model_context_window_exceeded",
        "session_too_long",  # the trainer's router: it has captured as many tokens as it may
    }
)
_FILTER_CODES = frozenset(
    {
        "content_filter",
        "content_filtered",
        "content_policy_violation",
        "moderation_blocked",
        "responsibleaipolicyviolation",
        "safety",
    }
)
_OVERFLOW_WORDS = re.compile(
    r"maximum (?:context|model|sequence|prompt) length"  # OpenAI, vLLM, DeepSeek, Mistral
    r"|model'?s (?:maximum )?context (?:length|window)"  # vLLM, SGLang
    r"|exceeds? (?:the )?(?:available |maximum |model )*context"  # llama.cpp, LM Studio, Ollama
    r"|context (?:length|window|size)[^.]{0,40}(?:exceed|overflow|too (?:small|long))"
    r"|context (?:the )?overflow"
    r"|(?:prompt|input|request|conversation)s? (?:is|are) (?:too long|longer than)"  # Anthropic, Bedrock, SGLang
    r"|too many (?:input |prompt )?tokens"
    r"|token count[^.]{0,60}exceeds the maximum"  # Gemini
    r"|exceeds the maximum number of (?:input )?tokens"
    r"|`inputs`(?: tokens \+ `max_new_tokens`)? must (?:be <=|have less than)"  # text-generation-inference
    r"|reduce the length of the (?:messages|prompt|input)",
    re.IGNORECASE,
)
_FILTER_WORDS = re.compile(
    r"content[ _](?:management )?(?:filter|policy)|flagged (?:by|as|for)|safety (?:system|check|filter)|usage polic",
    re.IGNORECASE,
)


class ModelRefused(Exception):
    """The model declined to answer, or a content filter held the request or the answer back."""


class ContextOverflow(Exception):
    """The conversation no longer fits the model's context."""


class ModelStopped(Exception):
    """The server has given this task up (410): nothing more will be answered."""


class RequestInvalid(Exception):
    """The model's server says that the request itself is wrong; the same one can never succeed."""


def failure_of(status: int, body: Any) -> Exception:
    """The exception that stands for an error answer of a model's server.

    Args:
        status: the HTTP status, 400 or above.
        body: the parsed JSON body, OpenAI's `{"error": {...}}` or that object alone, or any text.
    """
    codes, words = set(_codes(body)), _words(body)
    told = f"HTTP {status}: {words}"
    asked = 400 <= status < 500 and status not in (401, 404, 408, 410, 429)
    overflow = codes & _OVERFLOW_CODES or (asked and _OVERFLOW_WORDS.search(words))
    # Some servers answer an overflow with 500: there only a code is believed, for a 500 may quote anything.
    if overflow:
        return ContextOverflow(words)
    if codes & _FILTER_CODES or (asked and status in (400, 403, 422) and _FILTER_WORDS.search(words)):
        return ModelRefused(told)
    if status == 410:
        return ModelStopped(words)
    if status in _INVALID_STATUS:
        return RequestInvalid(told)
    if status == 401:
        return TideError("unauthorized", f"the model's server refuses the key: {words}")
    return TransportError(f"the model's server failed with HTTP {status}: {words}")


def parse_body(body: bytes) -> Any:
    """The JSON of an error's body, or its first characters as text."""
    try:
        return codec.loads(body)
    except codec.CodecError:
        return body[:MAX_WORDS].decode("utf-8", "replace")


def _error_fields(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        return {}
    fields = cast("Mapping[str, Any]", body)
    inner = fields.get("error", fields)
    if isinstance(inner, Mapping):
        return cast("Mapping[str, Any]", inner)
    return {**fields, "message": str(inner)}


def _codes(body: Any) -> Iterator[str]:
    """Whatever a server calls its kind of error: code, type, and the code of an inner error."""
    fields = _error_fields(body)
    inner = fields.get("innererror")
    nested = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else dict[str, Any]()
    for source in (fields, nested):
        for name in ("code", "type", "error_type"):
            value = source.get(name)
            if isinstance(value, str):
                yield value.lower()


def _words(body: Any) -> str:
    fields = _error_fields(body)
    return str(fields.get("message") or fields.get("detail") or body)[:MAX_WORDS]
