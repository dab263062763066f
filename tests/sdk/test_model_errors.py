"""What error answers of model servers mean, whoever wrote the server."""

from __future__ import annotations

import pytest

from tide_sdk.errors import TideError
from tide_sdk.http_connection import TransportError
from tide_sdk.model_errors import ContextOverflow, ModelRefused, ModelStopped, RequestInvalid, failure_of


def openai(code, message, kind="invalid_request_error"):
    return {"error": {"code": code, "message": message, "type": kind, "param": "messages"}}


OVERFLOWS = {
    "openai": (400, openai("context_length_exceeded", "This model's maximum context length is 128000 tokens.")),
    "vllm": (
        400,
        openai(400, "This model's maximum context length is 4096 tokens. However, you requested 5000.", "BadRequest"),
    ),
    "vllm before 0.10": (
        400,
        {
            "object": "error",
            "message": "The decoder prompt (length 9) is longer than the maximum model length of 8.",
            "type": "BadRequestError",
            "code": 400,
        },
    ),
    "sglang": (400, {"message": "The input (9000 tokens) is longer than the model's context length (8192 tokens)."}),
    "llama.cpp": (
        400,
        openai(400, "the request exceeds the available context size, try increasing it", "exceed_context_size_error"),
    ),
    "llama.cpp with 500": (500, openai(500, "context", "exceed_context_size_error")),
    "text-generation-inference": (
        422,
        {
            "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000",
            "error_type": "validation",
        },
    ),
    "anthropic": (400, {"error": {"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens"}}),
    "gemini": (400, openai(None, "The input token count (9) exceeds the maximum number of tokens allowed (8).")),
    "router": (400, openai("session_too_long", "the session has captured as many tokens as it may")),
}


@pytest.mark.parametrize("server", OVERFLOWS)
def test_an_overflow_is_known_by_its_code_or_words(server):
    assert isinstance(failure_of(*OVERFLOWS[server]), ContextOverflow)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, openai("content_filter", "The response was filtered"), ModelRefused),
        (400, {"error": {"code": "x", "innererror": {"code": "ResponsibleAIPolicyViolation"}}}, ModelRefused),
        (403, openai(None, "Content violates usage policies of the provider"), ModelRefused),
        (400, openai("invalid_value", "temperature must not be below 0"), RequestInvalid),
        (400, openai("template_refused", "the template wants user and assistant in turns"), RequestInvalid),
        (413, "Request Entity Too Large", RequestInvalid),
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}, RequestInvalid),
        (401, openai("invalid_api_key", "no"), TideError),
        (403, openai(None, "your region is not served"), TransportError),
        (404, openai("model_not_found", "the model's context window"), TransportError),
        (410, openai("session_ended", "the session has ended"), ModelStopped),
        (429, openai("rate_limit_exceeded", "too many tokens a minute"), TransportError),
        (500, "maximum context length", TransportError),
        (503, None, TransportError),
    ],
)  # fmt: skip
def test_every_other_answer_has_its_kind(status, body, kind):
    failure = failure_of(status, body)
    assert type(failure) is kind
    assert len(str(failure)) < 1100
