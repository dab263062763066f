"""The five endpoints as a plain ASGI app: this is the path that every turn takes.

    request -> headers, token -> body (bounded) -> JSON -> checked model -> service -> bytes

A framework's routing and serialisation would cost several times what the turn itself costs (docs/decisions/0002).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, ValidationError

from tide_gateway.auth import Owners
from tide_gateway.service.tasks import TaskService
from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.wire import CONTRACT_HEADER, CONTRACT_VERSION, EndRequest, EpochRequest, ObservationRequest, StartRequest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
M = TypeVar("M", bound=BaseModel)

MAX_BODY_BYTES = 16 * 1024 * 1024
BODY_TIMEOUT_S = 60.0
PATHS = frozenset({"/start", "/observation", "/pause", "/resume", "/end"})
_CONTRACT = (CONTRACT_HEADER.lower().encode(), str(CONTRACT_VERSION).encode())

log = logging.getLogger(__name__)


class ContractApp:
    """Serves `PATHS`.

    Args:
        service: what answers.
        owners: who calls.
        max_body_bytes: a larger body is refused with 413.
    """

    def __init__(self, service: TaskService, owners: Owners, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._service = service
        self._owners = owners
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every failure is problem+json."""
        try:
            status, body = await self._answer(scope, receive)
        except TideError as error:
            await send_problem(send, error)
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await send_problem(send, TideError("internal", "an unexpected failure; see the gateway's log"))
            return
        await _send(send, status, b"application/json", body, ())

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        path, method = scope["path"], scope["method"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if headers.get(_CONTRACT[0], _CONTRACT[1]) != _CONTRACT[1]:
            raise TideError("invalid", f"header {CONTRACT_HEADER}: this server speaks version {CONTRACT_VERSION}")
        owner = self._owners.owner(headers.get(b"authorization"))
        service = self._service
        if path == "/observation" and method == "GET":
            return 200, await service.latest(owner, _task_id_of(scope["query_string"]))
        if method != "POST":
            allowed = "GET, POST" if path == "/observation" else "POST"
            raise TideError("method_not_allowed", f"{path} takes {allowed}", allow=allowed)
        body = await self._read(headers, receive)
        data = parse_body(body)
        if path == "/observation":
            action = check(ObservationRequest, body)
            return 200, await service.observe(owner, action.task_id, action.turn, data["message"])
        if path == "/start":
            return 201, await service.start(owner, check(StartRequest, body), data)
        if path == "/end":
            return 200, await service.end(owner, check(EndRequest, body))
        change = service.pause if path == "/pause" else service.resume
        return 200, await change(owner, check(EpochRequest, body))

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        kind = headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
        if kind != b"application/json":
            raise TideError("media_type", "send the header Content-Type: application/json")
        limit = self._max_body_bytes
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            raise TideError("too_large", f"the body may have {limit} bytes at most", max_bytes=limit)
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            return body
        parts, size = [body], len(body)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while message.get("more_body"):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise TideError("invalid", "the body is incomplete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise TideError("too_large", f"the body may have {limit} bytes at most", max_bytes=limit)
        except TimeoutError as error:
            raise TideError("invalid", f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
        return b"".join(parts)


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        TideError: not JSON, not an object, or not storable as JSON again.
    """
    try:
        data = codec.loads(body)
        if body.count(b"[") + body.count(b"{") > codec.MAX_DEPTH:
            # Deep bodies can be read, but not written again: refuse them here, not after an action.
            codec.dumps(data)
    except codec.CodecError as error:
        raise TideError("invalid", f"the body is not valid JSON: {error}", field="body") from error
    if not isinstance(data, dict):
        raise TideError("invalid", "the body must be a JSON object", field="body")
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


def invalid(error: ValidationError) -> TideError:
    """The contract's error for a body that is not the model's."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in fault["loc"]) or "body"
    return TideError("invalid", f"{field}: {fault['msg']}", field=field)


def _task_id_of(query: bytes) -> str:
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("task_id", [])
    if len(values) != 1 or not 1 <= len(values[0]) <= 128:
        raise TideError("invalid", "task_id: give it once, as ?task_id=...", field="task_id")
    return values[0]


async def send_problem(send: Send, error: TideError) -> None:
    """Send an error as problem+json, with the headers that belong to its status."""
    extra: list[tuple[bytes, bytes]] = []
    if error.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if "allow" in error.extra:
        extra.append((b"allow", str(error.extra["allow"]).encode()))
    if "retry_after_s" in error.extra:
        extra.append((b"retry-after", str(error.extra["retry_after_s"]).encode()))
    body = codec.dumps(error.problem().model_dump(mode="json"))
    await _send(send, error.status, b"application/problem+json", body, extra)


async def _send(
    send: Send, status: int, kind: bytes, body: bytes, extra: list[tuple[bytes, bytes]] | tuple[()]
) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), _CONTRACT, *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
