"""The five endpoints as a plain ASGI app: this is the path that every turn takes.

    request -> headers, token -> body (bounded) -> JSON -> checked model -> service -> bytes

A framework's routing and serialisation would cost several times what the turn itself costs (docs/decisions/0002).
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, ValidationError

from tide_gateway.auth import Owners
from tide_gateway.service.tasks import TaskService
from tide_sdk import codec
from tide_sdk.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    check_version,
    invalid,
    parse_json,
    read_body,
    send_json,
    send_problem,
)
from tide_sdk.errors import TideError
from tide_sdk.wire import EndRequest, EpochRequest, ObservationRequest, StartRequest

M = TypeVar("M", bound=BaseModel)

MAX_BODY_BYTES = 16 * 1024 * 1024
PATHS = frozenset({"/start", "/observation", "/pause", "/resume", "/end"})

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
        except ClientGone:
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await send_problem(send, TideError("internal", "an unexpected failure; see the gateway's log"))
            return
        await send_json(send, status, body)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        path, method = scope["path"], scope["method"]
        check_version(scope)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        owner = self._owners.owner(headers.get(b"authorization"))
        service = self._service
        if path == "/observation" and method == "GET":
            return 200, await service.latest(owner, _task_id_of(scope["query_string"]))
        if method != "POST":
            allowed = "GET, POST" if path == "/observation" else "POST"
            raise TideError("method_not_allowed", f"{path} takes {allowed}", allow=allowed)
        body = await read_body(scope, receive, self._max_body_bytes)
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


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        TideError: not JSON, not an object, or not storable as JSON again.
    """
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


def _task_id_of(query: bytes) -> str:
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("task_id", [])
    if len(values) != 1 or not 1 <= len(values[0]) <= 128:
        raise TideError("invalid", "task_id: give it once, as ?task_id=...", field="task_id")
    return values[0]
