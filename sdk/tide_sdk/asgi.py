"""The few pieces of a plain ASGI handler: read a JSON body, send JSON, send a problem.

Own code because a framework costs more per call than an environment's whole turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from math import ceil
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.timers import within
from tide_sdk.wire import CONTRACT_HEADER, CONTRACT_VERSION

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
Whole = Callable[[int, bytes, bytes], bool]
"""Sends status, header lines and body in one piece, or answers False (`tide_sdk.answering`)."""
M = TypeVar("M", bound=BaseModel)

WHOLE = "tide.whole"
"""The scope's entry with its `Whole`; absent where another server than ours calls the application."""
MAX_WHOLE_BYTES = 16 * 1024
"""A body up to this size goes into the connection's buffer as it is; a larger one waits for its reader."""

BODY_LIMIT_S = 60.0
"""Seconds in which a caller must have sent the whole body."""
_CONTRACT = (CONTRACT_HEADER.lower().encode(), str(CONTRACT_VERSION).encode())
_JSON_TYPE = b"application/json"
_JSON = ((b"content-type", _JSON_TYPE), _CONTRACT)
_JSON_HEAD = b"".join(b"%b: %b\r\n" % field for field in _JSON)
_PARTS_FORM = "list[dict[str,any]]"
_PROBLEM = ((b"content-type", b"application/problem+json"), _CONTRACT)


class ClientGone(Exception):
    """The caller went away while its body was read."""


class BodyCount(Protocol):
    """Who counts the bytes of bodies that are in memory; either method may refuse with an error of the contract."""

    def expect(self, num_bytes: int) -> None:
        """A body says that it has that length; none of it was read."""
        ...

    def hold(self, num_bytes: int) -> None:
        """So many bytes more are there."""
        ...


def check_version(scope: Scope) -> None:
    """Refuse a call that names another version of the contract.

    Raises:
        TideError: 422.
    """
    headers: Headers = scope["headers"]
    for name, value in headers:
        if name == _CONTRACT[0]:
            _check_named_version(value)


def _check_named_version(value: bytes) -> None:
    if value.strip() != _CONTRACT[1]:
        words = f"{CONTRACT_HEADER}: this server speaks version {CONTRACT_VERSION}"
        raise TideError("invalid", words, field=CONTRACT_HEADER)


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, count: BodyCount | None = None, *, media_type: bytes = _JSON_TYPE
) -> bytes:
    """The whole body of a call, received within `BODY_LIMIT_S`.

    Args:
        scope: of the request.
        receive: gives the body.
        max_bytes: a larger one is refused.
        count: is told of each byte before it is kept.
        media_type: what the body must be; with a slash at its end any such type, as `image/`.

    Raises:
        TideError: 413, 415, 422 for another contract version or a body that does not come, or what `count` raises.
        ClientGone: the connection ended before the body did.
    """
    content_type = b""
    num_bytes = 0
    headers: Headers = scope["headers"]
    for name, value in headers:
        if name == b"content-type":
            content_type = value
        elif name == b"content-length" and value.isdigit():
            num_bytes = int(value)
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            raise TideError("media_type", "Content-Encoding: send the body as it is, not compressed")
        elif name == _CONTRACT[0]:
            _check_named_version(value)
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    if content_type != media_type:
        found = content_type.partition(b";")[0].strip().lower()
        if found != media_type and not (media_type.endswith(b"/") and found.startswith(media_type)):
            raise TideError("media_type", f"send the body with Content-Type: {media_type.decode()}")
    if count is not None:
        count.expect(num_bytes)
    try:
        return await within(BODY_LIMIT_S, _receive_all(receive, max_bytes, count))
    except TimeoutError as error:
        words = f"body: it did not arrive within {BODY_LIMIT_S:g} s"
        raise TideError("invalid", words, field="body") from error


async def _receive_all(receive: Receive, max_bytes: int, count: BodyCount | None) -> bytes:
    pieces: list[bytes] = []
    num_bytes, more = 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = event.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if count is not None:
            count.hold(len(piece))
        pieces.append(piece)
        more = event.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(max_bytes: int) -> TideError:
    return TideError("too_large", f"body: it may have at most {max_bytes} bytes", field="body", max_bytes=max_bytes)


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
        raise invalid(error) from error


def invalid(error: ValidationError) -> TideError:
    """The contract's error for a body that is not the model's; it names the first wrong field."""
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    if first["loc"][-2:] == ("content", "str") and others:
        first = others[0]  # what is no text may be parts, and a fault of theirs says more
    # A key that is at fault stands before its mark, not behind it; the mark of a form is no part of the path.
    field = ".".join(str(part) for part in first["loc"] if part not in ("[key]", _PARTS_FORM)) or "body"
    words = first["msg"]
    if first["type"] == "extra_forbidden":
        words = "unknown field, remove it"
    elif first["loc"][-1:] == (_PARTS_FORM,) and first["type"] == "list_type":
        words = "must be text, or a list of parts"
    return TideError("invalid", f"{field}: {words}", field=field, num_errors=error.error_count())


async def send_json(
    send: Send, status: int, body: bytes, headers: Headers = _JSON, *, whole: Whole | None = None
) -> None:
    """Send a complete JSON answer, in one piece through `whole` where it is small.

    `headers` replace content type and contract version.
    """
    if whole is not None and len(body) <= MAX_WHOLE_BYTES:
        head = _JSON_HEAD if headers is _JSON else b"".join(b"%b: %b\r\n" % field for field in headers)
        if whole(status, head, body):
            return
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_problem(send: Send, error: TideError) -> None:
    """Send an error as problem+json, with the headers that belong to its status."""
    headers = list(_PROBLEM)
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    retry_after_s = error.extra.get("retry_after_s")
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, ceil(retry_after_s))).encode()))
    if error.code == "method_not_allowed" and "allow" in error.extra:
        headers.append((b"allow", str(error.extra["allow"]).encode()))
    await send_json(send, error.status, codec.dumps(error.problem().model_dump()), headers)
