"""The few pieces of a plain ASGI handler: read a JSON body, send JSON, send a problem.

Own code because a framework costs more per call than an environment's whole turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.wire import CONTRACT_HEADER, CONTRACT_VERSION

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
M = TypeVar("M", bound=BaseModel)

_CONTRACT = (CONTRACT_HEADER.lower().encode(), str(CONTRACT_VERSION).encode())
_JSON = ((b"content-type", b"application/json"), _CONTRACT)
_PROBLEM = ((b"content-type", b"application/problem+json"), _CONTRACT)


class ClientGone(Exception):
    """The caller went away while its body was read."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body of a JSON call.

    Raises:
        TideError: 413, 415, or 422 for another contract version.
        ClientGone: the connection ended before the body did.
    """
    content_type = b""
    for name, value in cast("Headers", scope["headers"]):
        if name == b"content-type":
            content_type = value
        elif name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise TideError("too_large", f"the body may have at most {max_bytes} bytes", max_bytes=max_bytes)
        elif name == _CONTRACT[0] and value.strip() != _CONTRACT[1]:
            raise TideError("invalid", f"{CONTRACT_HEADER}: this server speaks version 1", field=CONTRACT_HEADER)
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise TideError("media_type", "send the body with Content-Type: application/json")
    event = await receive()
    body: bytes = event.get("body", b"")
    if event.get("more_body"):
        pieces, num_bytes = [body], len(body)
        while event.get("more_body"):
            event = await receive()
            piece: bytes = event.get("body", b"")
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise TideError("too_large", f"the body may have at most {max_bytes} bytes", max_bytes=max_bytes)
        body = b"".join(pieces)
    if event["type"] == "http.disconnect":
        raise ClientGone
    if len(body) > max_bytes:
        raise TideError("too_large", f"the body may have at most {max_bytes} bytes", max_bytes=max_bytes)
    return body


def parse_json(body: bytes) -> Any:
    """The body as parsed JSON.

    Raises:
        TideError: 422.
    """
    try:
        return codec.loads(body)
    except codec.CodecError as error:
        raise TideError("invalid", f"body: {error}", field="body") from error


def validate(model: type[M], data: Any) -> M:
    """Parsed data as a wire model.

    Raises:
        TideError: 422 naming the first wrong field.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        words = "unknown field, remove it" if first["type"] == "extra_forbidden" else first["msg"]
        raise TideError("invalid", f"{field}: {words}", field=field, num_errors=error.error_count()) from error


async def send_json(send: Send, status: int, body: bytes, headers: Headers = _JSON) -> None:
    """Send a complete JSON answer; `headers` replace content type and contract version."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_problem(send: Send, error: TideError) -> None:
    """Send an error as problem+json, with Retry-After where the error knows `retry_after_s`."""
    headers = list(_PROBLEM)
    retry_after_s = error.extra.get("retry_after_s")
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(retry_after_s))).encode()))
    if error.code == "method_not_allowed" and "allow" in error.extra:
        headers.append((b"allow", str(error.extra["allow"]).encode()))
    await send_json(send, error.status, codec.dumps(error.problem().model_dump()), headers)
