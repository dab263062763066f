"""The five endpoints as a plain ASGI app: this is the path that every turn takes.

    request -> headers, token -> body (bounded) -> JSON -> checked model -> service -> bytes

A framework's routing and serialisation would cost several times what the turn itself costs (docs/decisions/0002).
"""

from __future__ import annotations

import logging
import re
from typing import Any
from urllib.parse import parse_qs

from tide_gateway.auth import Owners
from tide_gateway.endpoints.calls import HELD, MAX_SMALL_BODY_BYTES, authorization_of, check, check_size, parse_body
from tide_gateway.endpoints.sending import HeldSend
from tide_gateway.load import Held
from tide_gateway.plain import few_brackets, plain_action
from tide_gateway.repository import StorageFailed
from tide_gateway.roles import Caller
from tide_gateway.service.tasks import TaskService
from tide_sdk.asgi import (
    WHOLE,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    check_version,
    read_body,
    send_json,
    send_problem,
)
from tide_sdk.errors import TideError
from tide_sdk.images import REFERENCE_MARK
from tide_sdk.wire import IMAGES_HEADER, PRINTABLE, EndRequest, EpochRequest, ObservationRequest, StartRequest

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_TASK_BYTES = 4 * 1024 * 1024
MAX_TASK_DEPTH = 64
PATHS = frozenset({"/start", "/observation", "/pause", "/resume", "/end"})
_PRINTABLE = re.compile(PRINTABLE.removesuffix("$") + r"\Z")  # in Python "$" lets a last new line pass
_IMAGES = IMAGES_HEADER.lower().encode()
_WAITING = frozenset({"/start", "/observation"})
"""Their POST may wait for an environment."""

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
        except StorageFailed as error:
            await send_problem(send, storage_failed(error))
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await send_problem(send, TideError("internal", "an unexpected failure; see the gateway's log"))
            return
        if isinstance(send, HeldSend):
            await send.json(status, body, scope.get(WHOLE))
        else:
            await send_json(send, status, body)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        path, method = scope["path"], scope["method"]
        check_version(scope)
        authorization = authorization_of(scope)
        caller = self._owners.at_hand(authorization) or await self._owners.caller(authorization)
        held: Held | None = scope.get(HELD)
        if held is not None:
            held.enter(caller.owner, "waiting" if method == "POST" and path in _WAITING else "quick")
        status, body = await self._asked(path, method, caller, scope, receive)
        if REFERENCE_MARK in body and not _wants_references(scope):
            # An operator may have asked for another's.
            owner = None if caller.may("operator") else caller.owner
            body = await self._service.inlined(owner, body)
        return status, body

    async def _asked(self, path: str, method: str, caller: Caller, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        held: Held | None = scope.get(HELD)
        if path == "/observation" and method == "GET":
            task_id = _task_id_of(scope["query_string"])
            return 200, await self._owners.for_task(caller, task_id, lambda owner: self._service.latest(owner, task_id))
        if method != "POST":
            allowed = "GET, POST" if path == "/observation" else "POST"
            raise TideError("method_not_allowed", f"{path} takes {allowed}", allow=allowed)
        if path == "/observation":
            # Nothing else of the body is kept while the environment acts.
            task_id, turn, message = _action_of(await read_body(scope, receive, self._max_body_bytes, held))
            # An operator reads and ends the tasks of others, but does not act in them.
            return 200, await self._service.observe(caller.owner, task_id, turn, message)
        if path == "/start":
            request, data = _start_of(await read_body(scope, receive, self._max_body_bytes, held))
            return 201, await self._service.start(caller.owner, request, data)
        body = await read_body(scope, receive, min(self._max_body_bytes, MAX_SMALL_BODY_BYTES), held)
        return 200, await self._on_task(path, caller, body)

    async def _on_task(self, path: str, caller: Caller, body: bytes) -> bytes:
        parse_body(body)
        if path == "/end":
            ending = check(EndRequest, body)
            return await self._owners.for_task(caller, ending.task_id, lambda owner: self._service.end(owner, ending))
        request = check(EpochRequest, body)
        change = self._service.pause if path == "/pause" else self._service.resume
        return await self._owners.for_task(caller, request.task_id, lambda owner: change(owner, request))


def storage_failed(error: StorageFailed) -> TideError:
    """What a caller is told while the database does not answer, which is logged where it is noticed first."""
    return TideError("unavailable", f"the database does not answer: {error}; call again", retry_after_s=1)


def _action_of(body: bytes) -> tuple[str, int, dict[str, Any]]:
    data = parse_body(body)
    if few_brackets(body) and (plain := plain_action(data)) is not None:
        return plain
    action = check(ObservationRequest, body)
    return action.task_id, action.turn, data["message"]


def _start_of(body: bytes) -> tuple[StartRequest, dict[str, Any]]:
    data = parse_body(body)
    request = check(StartRequest, body)
    if request.task:
        check_size("task", request.task, MAX_TASK_BYTES, MAX_TASK_DEPTH)
    return request, data


def _wants_references(scope: Scope) -> bool:
    headers: Headers = scope["headers"]
    return any(name == _IMAGES and value.strip().lower() == b"reference" for name, value in headers)


def _task_id_of(query: bytes) -> str:
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("task_id", [])
    if len(values) != 1 or not 1 <= len(values[0]) <= 128 or not _PRINTABLE.match(values[0]):
        raise TideError("invalid", "task_id: give it once, as ?task_id=...", field="task_id")
    return values[0]
