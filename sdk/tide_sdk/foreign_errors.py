"""What the exceptions of other libraries' model clients mean, told by class names and attributes: none is imported.

Known: the clients of OpenAI and Anthropic, httpx and its kin, aiohttp, requests, urllib3, litellm, and the frameworks
that wrap them, pydantic-ai among them. Where an exception says nothing, what it was raised from is looked at:

- `raise X from Y`: X was made of Y on purpose, so Y's meaning counts, whatever X is.
- X raised while Y was handled: Y counts, unless X is one of Python's own errors that stand for a mistake in the code
  (`NameError`, `TypeError`, `KeyError`, `ValueError` ...): that is a bug in the handler.
- `raise X from None`: Y is not looked at.
- a group of exceptions: its gravest member counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from tide_sdk.errors import StoppedEarly, TideError, told
from tide_sdk.http_connection import TransportError
from tide_sdk.model_errors import (
    MAX_WORDS,
    ContextOverflow,
    ModelRefused,
    ModelStopped,
    RequestInvalid,
    failure_of,
    parse_body,
)

MAX_LINKS = 64
"""Exceptions that are looked at, in the chain and in groups together."""

_OWN = (TideError, TransportError, ContextOverflow, ModelRefused, ModelStopped, RequestInvalid, StoppedEarly)
_BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
# By the name of the exception's class or of one of its bases.
_NAMED: Mapping[str, type[Exception]] = {
    "ModelContextWindowExceededError": ContextOverflow,  # pydantic-ai
    "ContextWindowExceededError": ContextOverflow,  # litellm
    "ContentFilterFinishReasonError": ModelRefused,  # openai
    "ContentFilterError": ModelRefused,  # pydantic-ai
    "ContentPolicyViolationError": ModelRefused,  # litellm
    "LengthFinishReasonError": StoppedEarly,  # openai
    "OutputTokenLimitExceeded": StoppedEarly,  # pydantic-ai
    "UsageLimitExceeded": StoppedEarly,  # pydantic-ai
}
_WEAK: Mapping[str, type[Exception]] = {"UnexpectedModelBehavior": StoppedEarly}  # pydantic-ai
"""Believed only where nothing else in the chain says more."""
_UNANSWERED = frozenset(
    {
        "APIConnectionError",  # openai, anthropic, litellm
        "APIResponseValidationError",
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "ConcurrencyLimitExceeded",  # pydantic-ai
        "ConnectionError",  # requests
        "MaxRetryError",  # urllib3
        "ModelConnectionError",
        "ModelQuotaExceededError",
        "ModelRateLimitError",
        "ModelRequestTimeout",
        "ModelServerError",
        "ModelUnavailableError",
        "Timeout",  # requests
        "TransportError",  # httpx
        "URLError",  # urllib
    }
)
_CLIENTS = frozenset(
    {
        "aiohttp",
        "anthropic",
        "httpcore",
        "httpx",
        "httpx2",
        "litellm",
        "openai",
        "pydantic_ai",
        "requests",
        "urllib",
        "urllib3",
    }
)


def meanings(error: BaseException) -> list[Exception | None]:
    """What the exception stands for in the SDK's own exceptions, one for each branch of a group; None is a bug."""
    return list(_branches(error, [MAX_LINKS]))


def _branches(error: BaseException, left: list[int]) -> Iterator[Exception | None]:
    weak: Exception | None = None
    link: BaseException | None = error
    while link is not None and left[0] > 0:
        left[0] -= 1
        if isinstance(link, BaseExceptionGroup):
            for member in cast("BaseExceptionGroup[BaseException]", link).exceptions:
                yield from _branches(member, left)
            return
        meant = link if isinstance(link, _OWN) else _meaning(link)
        if meant is not None:
            yield meant
            return
        weak = weak or _named(link, _WEAK)
        link = _raised_from(link)
    yield weak


def _raised_from(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ or isinstance(error, _BUGS) else error.__context__


def _meaning(error: BaseException) -> Exception | None:
    named = _named(error, _NAMED)
    if named is not None:
        return named
    foreign = any(kind.__module__.partition(".")[0] in _CLIENTS for kind in type(error).__mro__)
    status, body = _status(error, foreign), _body(error)
    if status is not None and status >= 400:
        return failure_of(status, told(error, MAX_WORDS) if body is None else body)
    names = {kind.__name__ for kind in type(error).__mro__}
    if foreign and "APIError" in names and body is not None:
        return failure_of(500, body)  # the error came inside a stream
    if isinstance(error, ConnectionError) or (foreign and not _UNANSWERED.isdisjoint(names)):
        return TransportError(told(error))
    return None


def _named(error: BaseException, table: Mapping[str, type[Exception]]) -> Exception | None:
    for kind in type(error).__mro__:
        meant = table.get(kind.__name__)
        if meant is not None:
            return meant(told(error))
    return None


def _status(error: BaseException, foreign: bool) -> int | None:
    places = [(error, "status_code"), (_attribute(error, "response"), "status_code")]
    if foreign:
        places += [(error, "status"), (error, "code")]
    for holder, name in places:
        value = _attribute(holder, name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _body(error: BaseException) -> Any:
    body = _attribute(error, "body")
    if body is not None:
        return body
    content = _attribute(_attribute(error, "response"), "content")
    return parse_body(content) if isinstance(content, bytes) else None


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001 (a property of a foreign class: it raises where, say, a body was never read)
        return None
