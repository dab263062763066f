"""OpenAI's answers: whole ones, the chunks of streams, and the list of models.

A stream is made of an answer that was captured already (docs/decisions/0017-streams-follow-the-capture.md). Its chunks
put together are the whole answer; text and log-probs go side by side, each in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tide_sdk import codec
from tide_trainer.router.openai_wire import Answer, ModelRequest, TokenText

TEXT_PIECE_CHARS = 512
LOGPROB_PIECE_TOKENS = 64
DONE = b"data: [DONE]\n\n"


def write_chat(answer: Answer, request: ModelRequest, token_text: TokenText) -> bytes:
    """A whole chat completion."""
    choice: dict[str, Any] = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    if request.logprobs:
        choice["logprobs"] = {"content": _logprobs(answer, token_text)}
    body = _chat_head(answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}
    if request.token_ids:
        choice["token_ids"] = answer.token_ids
        body["prompt_token_ids"] = answer.prompt_ids
    return codec.dumps(body)


def chat_events(answer: Answer, request: ModelRequest, token_text: TokenText) -> Iterator[bytes]:
    """The same as server-sent events: the role, deltas, the finish reason, the usage if it was asked for."""
    head = _chat_head(answer, "chat.completion.chunk")
    empty = {"usage": None} if request.include_usage else {}
    first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    if request.token_ids:
        first["token_ids"] = answer.token_ids
        yield _event(head | {"choices": [first], "prompt_token_ids": answer.prompt_ids} | empty)
    else:
        yield _event(head | {"choices": [first]} | empty)
    logprobs = _logprobs(answer, token_text) if request.logprobs else []
    groups = _pieces(logprobs, LOGPROB_PIECE_TOKENS)
    for delta, group in itertools.zip_longest(_deltas(answer.message), groups):
        choice: dict[str, Any] = {"index": 0, "delta": delta or {}, "finish_reason": None}
        if group:
            choice["logprobs"] = {"content": group}
        yield _event(head | {"choices": [choice]} | empty)
    yield _event(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]} | empty)
    if request.include_usage:
        yield _event(head | {"choices": [], "usage": _usage(answer)})
    yield DONE


def write_completion(answer: Answer, request: ModelRequest, token_text: TokenText) -> bytes:
    """A whole completion in the older form."""
    choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish_reason, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = _legacy_logprobs(answer, token_text)
    if request.token_ids:
        choice |= {"token_ids": answer.token_ids, "prompt_token_ids": answer.prompt_ids}
    return codec.dumps(_completion_head(answer) | {"choices": [choice], "usage": _usage(answer)})


def completion_events(answer: Answer, request: ModelRequest, token_text: TokenText) -> Iterator[bytes]:
    """The same as server-sent events."""
    head = _completion_head(answer)
    empty = {"usage": None} if request.include_usage else {}
    logprobs = _legacy_logprobs(answer, token_text) if request.logprobs else {}
    groups = _legacy_pieces(logprobs)
    more: dict[str, Any] = {}
    if request.token_ids:
        more = {"token_ids": answer.token_ids, "prompt_token_ids": answer.prompt_ids}
    for text, group in itertools.zip_longest(_pieces(answer.text, TEXT_PIECE_CHARS), groups):
        choice = {"index": 0, "text": text or "", "logprobs": group, "finish_reason": None} | more
        more = {}
        yield _event(head | {"choices": [choice]} | empty)
    last = {"index": 0, "text": "", "logprobs": None, "finish_reason": answer.finish_reason} | more
    yield _event(head | {"choices": [last]} | empty)
    if request.include_usage:
        yield _event(head | {"choices": [], "usage": _usage(answer)})
    yield DONE


def write_models(model: str, created: int, max_context_tokens: int) -> bytes:
    """The list of models: the one that is served."""
    return codec.dumps({"object": "list", "data": [_model(model, created, max_context_tokens)]})


def write_model(model: str, created: int, max_context_tokens: int) -> bytes:
    """The model that is served."""
    return codec.dumps(_model(model, created, max_context_tokens))


def _model(model: str, created: int, max_context_tokens: int) -> dict[str, Any]:
    about = {"id": model, "object": "model", "created": created, "owned_by": "tide"}
    return about | {"max_model_len": max_context_tokens}


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The message in pieces, in the order in which a model says them: thoughts, text, tool calls."""
    for name in ("reasoning_content", "content"):
        for piece in _pieces(message.get(name) or "", TEXT_PIECE_CHARS):
            yield {name: piece}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        named = {"name": function["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": named}]}
        for piece in _pieces(function["arguments"], TEXT_PIECE_CHARS):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _pieces(whole: Any, size: int) -> Iterator[Any]:
    return (whole[start : start + size] for start in range(0, len(whole), size))


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + codec.dumps(chunk) + b"\n\n"


def _chat_head(answer: Answer, kind: str) -> dict[str, Any]:
    return _head(answer, f"chatcmpl-{answer.call}", kind)


def _completion_head(answer: Answer) -> dict[str, Any]:
    return _head(answer, f"cmpl-{answer.call}", "text_completion")


def _head(answer: Answer, name: str, kind: str) -> dict[str, Any]:
    head = {"id": name, "object": kind, "created": answer.created, "model": answer.model}
    # OpenAI's name for what changes with the weights.
    return head | {"system_fingerprint": f"version-{answer.version}" if answer.version >= 0 else None}


def _usage(answer: Answer) -> Mapping[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _logprobs(answer: Answer, token_text: TokenText) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for token_id, value in zip(answer.token_ids, answer.logprobs, strict=True):
        text = token_text(token_id)
        content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return content


def _legacy_logprobs(answer: Answer, token_text: TokenText) -> dict[str, Any]:
    tokens = [token_text(token_id) for token_id in answer.token_ids]
    offsets = [0, *itertools.accumulate(len(text) for text in tokens)][: len(tokens)]
    return {"tokens": tokens, "token_logprobs": answer.logprobs, "top_logprobs": None, "text_offset": offsets}


def _legacy_pieces(logprobs: Mapping[str, Sequence[Any] | None]) -> Iterable[dict[str, Any]]:
    num_tokens = len(logprobs.get("tokens") or ())
    for start in range(0, num_tokens, LOGPROB_PIECE_TOKENS):
        part = slice(start, start + LOGPROB_PIECE_TOKENS)
        yield {name: None if values is None else values[part] for name, values in logprobs.items()}
