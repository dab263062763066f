"""What all endpoints need of a call: who makes it, and its body as a checked model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from tide_gateway.auth import Owners
from tide_gateway.load import Held
from tide_gateway.roles import Caller
from tide_sdk import codec
from tide_sdk.asgi import Headers, Scope, invalid, parse_json, read_body
from tide_sdk.errors import TideError

if TYPE_CHECKING:
    from fastapi import Request

M = TypeVar("M", bound=BaseModel)

MAX_SMALL_BODY_BYTES = 64 * 1024
"""Of the calls that carry neither a message nor a task's parameters."""
MAX_CONTAINERS = 500_000
"""Arrays and objects in a body."""


HELD = "tide.held"
"""The scope's entry with what the call holds (`tide_gateway.load`); `GatewayApp` puts it there."""


def authorization_of(scope: Scope) -> bytes | None:
    """The one header `Authorization`, None where there is none.

    Raises:
        TideError: 401, there are two: a proxy that looked at one of them may have meant the other.
    """
    found: bytes | None = None
    for name, value in cast("Headers", scope["headers"]):
        if name == b"authorization":
            if found is not None:
                raise TideError("unauthorized", "send the header Authorization once")
            found = value
    return found


async def caller_of(request: Request, owners: Owners) -> Caller:
    """Who makes the call, which counts from here on as one of its owner's.

    Raises:
        TideError: 401, 429 or 503.
    """
    caller = await owners.caller(authorization_of(request.scope))
    held: Held | None = request.scope.get(HELD)
    if held is not None:
        held.enter(caller.owner, "view")
    return caller


async def small_body_of(request: Request) -> bytes:
    """The body of a call that carries neither a message nor a task's parameters.

    Raises:
        TideError: as `read_body`.
        ClientGone: as `read_body`.
    """
    return await read_body(request.scope, request.receive, MAX_SMALL_BODY_BYTES, request.scope.get(HELD))


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        TideError: not JSON, not an object, or not storable as JSON again.
    """
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        # Each costs a hundred times its bytes once it is read.
        words = f"body: more than {MAX_CONTAINERS} arrays and objects (brackets and braces in texts are counted too)"
        raise TideError("too_large", words, field="body")
    data = parse_json(body)
    try:
        if body.count(b"[") + body.count(b"{") > codec.MAX_DEPTH:
            # Deep bodies can be read, but not written again: refuse them here, not after an action.
            codec.dumps(data)
    except codec.CodecError as error:
        raise TideError("invalid", f"body: {error}", field="body") from error
    if not isinstance(data, dict):
        raise TideError("invalid", "body: must be a JSON object", field="body")
    return data


def check(model: type[M], body: bytes) -> M:
    """The checked body; strict, so that "1" and true are no numbers.

    Raises:
        TideError: naming the first field that is wrong.
    """
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise invalid(error) from error


def described(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI of a body that the endpoint reads itself: FastAPI would read any size, and before it asks for a key."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def check_size(field: str, data: Any, max_bytes: int, max_depth: int) -> None:
    """Refuse a field that is too large or nested too deeply.

    Raises:
        TideError: 413 or 422, with the field's name.
    """
    if len(codec.dumps(data)) > max_bytes:
        words = f"{field}: it may have at most {max_bytes} bytes as JSON"
        raise TideError("too_large", words, field=field, max_bytes=max_bytes)
    level = [data]
    for _ in range(max_depth + 1):
        level = [part for whole in level for part in _parts(whole)]
        if not level:
            return
    raise TideError("invalid", f"{field}: it may be nested at most {max_depth} deep", field=field)


def _parts(data: Any) -> list[Any]:
    values = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [value for value in values if isinstance(value, (dict, list))]
