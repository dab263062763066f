"""The router's HTTP side: a plain ASGI application, no framework on the way of a turn.

POST /sessions/{session}/v1/chat/completions    GET /sessions/{session}/v1/models
POST /footprints                                GET /health
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any, cast

from tide_sdk import asgi, codec
from tide_sdk.errors import TideError
from tide_trainer.router.calls import Calls, Notify
from tide_trainer.router.control import Control
from tide_trainer.router.openai_wire import (
    Answer,
    ApiError,
    now_s,
    read_request,
    write_answer,
    write_models,
    write_stream,
)
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.reports import Reports
from tide_trainer.router.state import Flight, Limits, Session

_LOG = logging.getLogger(__name__)
_PREFIX = "/sessions/"
_CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_RETRY_HEADER = b"x-stainless-retry-count"


class RouterApp:
    """ASGI application; `closing` answers everything with 503."""

    def __init__(
        self, control: Control, calls: Calls, renderer: Renderer, notify: Notify, limits: Limits, model: str
    ) -> None:
        self._control = control
        self._calls = calls
        self._renderer = renderer
        self._notify = notify
        self._limits = limits
        self._model = model
        self._created = now_s()
        self._fresh = itertools.count()
        self._reports = Reports(control, calls, notify, limits)
        self.closing = False

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """ASGI's entry."""
        if scope["type"] != "http":
            return
        try:
            if self.closing:
                raise ApiError(503, "shutting_down", "the router is shutting down", kind="server_error")
            await self._route(scope, receive, send)
        except ApiError as error:
            await asgi.send_json(send, error.status, error.body(), (_JSON,))
        except TideError as error:
            plain = ApiError(error.status, error.code, error.detail, param=error.extra.get("field"))
            await asgi.send_json(send, plain.status, plain.body(), (_JSON,))
        except asgi.ClientGone:
            return
        except Exception:  # noqa: BLE001 - the boundary of HTTP: logged, and answered
            _LOG.exception("%s %s failed", scope["method"], scope["path"])
            failed = ApiError(500, "internal", "unexpected failure in the router; see its log", kind="server_error")
            await asgi.send_json(send, failed.status, failed.body(), (_JSON,))

    def close(self) -> None:
        """Refuse what comes and cancel what is in flight."""
        self.closing = True
        for session in self._control.sessions.values():
            for flight in session.flights.values():
                flight.task.cancel()

    async def _route(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        path, method = cast("str", scope["path"]), scope["method"]
        if path.startswith(_PREFIX) and path.endswith(_CHAT):
            _only(method, "POST")
            headers = _wanted_headers(scope)
            session = self._session(path[len(_PREFIX) : -len(_CHAT)], headers)
            await self._chat(session, headers, scope, receive, send)
        elif path.startswith(_PREFIX) and path.endswith(_MODELS):
            _only(method, "GET")
            session = self._session(path[len(_PREFIX) : -len(_MODELS)], _wanted_headers(scope))
            body = write_models(self._model, self._created, session.max_context_tokens)
            await asgi.send_json(send, 200, body, (_JSON,))
        elif path == "/footprints":
            _only(method, "POST")
            await self._footprints(scope, receive, send)
        elif path == "/health":
            _only(method, "GET")
            body = {"status": "ok", "sessions": len(self._control.sessions), "held": self._calls.num_held}
            await asgi.send_json(send, 200, codec.dumps(body | {"running": self._calls.num_running}), (_JSON,))
        else:
            raise ApiError(404, "not_found", f"no endpoint {path}")

    async def _chat(
        self,
        session: Session,
        headers: Mapping[bytes, bytes],
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
    ) -> None:
        body = await asgi.read_body(scope, receive, self._limits.max_body_bytes)
        request = read_request(asgi.parse_json(body))
        key = hashlib.blake2b(body, digest_size=16).digest()
        # The official client counts its retries. A client that does not is taken to repeat a call, never to want a
        # second sample of the same messages: a doubled capture is worse than an answer given twice.
        retries = headers.get(_RETRY_HEADER)
        answer = None
        if retries != b"0":
            if session.last is not None and session.last[0] == key:
                answer = session.last[1]
        else:
            key += b"%d" % next(self._fresh)
        if answer is None:
            flight = session.flights.get(key) or self._start(session, key, request)
            answer = await self._answered(flight, receive)
        token_text = self._renderer.token_text if request.logprobs else None
        if request.stream:
            body = write_stream(answer, token_text, include_usage=request.include_usage)
        else:
            body = write_answer(answer, token_text)
        head: list[tuple[bytes, bytes]] = [_EVENTS if request.stream else _JSON]
        if request.ignored:
            head.append((b"tide-ignored", ", ".join(request.ignored).encode()))
        await asgi.send_json(send, 200, body, head)

    def _start(self, session: Session, key: bytes, request: Any) -> Flight:
        if len(session.flights) >= self._limits.max_waiting_calls:
            message = f"{self._limits.max_waiting_calls} calls of this session are in flight; wait for one"
            raise ApiError(429, "rate_limit_exceeded", message, kind="rate_limit_error")
        flight = Flight(asyncio.create_task(self._calls.run(session, request)))
        session.flights[key] = flight

        def landed(task: asyncio.Task[Answer]) -> None:
            session.flights.pop(key, None)
            if not task.cancelled() and task.exception() is None:
                session.last = (key[:16], task.result())

        flight.task.add_done_callback(landed)
        return flight

    def _session(self, name: str, headers: Mapping[bytes, bytes]) -> Session:
        session = self._control.sessions.get(name)
        given = headers.get(b"authorization", b"")
        if session is None and self._control.ended(name):
            raise ApiError(410, "session_ended", "the session has ended")
        if session is None:
            raise ApiError(404, "session_not_found", "no such session")
        if not hmac.compare_digest(given, b"Bearer " + session.api_key):
            raise ApiError(401, "invalid_api_key", "send the session's api_key as a bearer token")
        return session

    async def _answered(self, flight: Flight, receive: asgi.Receive) -> Any:
        """The flight's answer; a client that goes away leaves it, and the last one to leave cancels it."""
        flight.num_waiting += 1
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((flight.task, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            flight.num_waiting -= 1
            gone.cancel()
            if not flight.task.done() and flight.num_waiting == 0:
                flight.task.cancel()
        if not flight.task.done():
            raise asgi.ClientGone
        if flight.task.cancelled() and self.closing:
            raise ApiError(503, "shutting_down", "the router is shutting down", kind="server_error")
        if flight.task.cancelled():
            raise ApiError(410, "session_ended", "the session ended while this call waited")
        return flight.task.result()

    async def _footprints(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        given = _wanted_headers(scope).get(b"authorization", b"")
        body = await asgi.read_body(scope, receive, self._limits.max_body_bytes)
        told = await self._reports.answer(given, body, lambda flight: self._answered(flight, receive))
        await asgi.send_json(send, 200, codec.dumps(told), (_JSON,))


async def _disconnected(receive: asgi.Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _wanted_headers(scope: asgi.Scope) -> dict[bytes, bytes]:
    pairs = cast("Iterable[tuple[bytes, bytes]]", scope["headers"])
    return {name: value for name, value in pairs if name in (b"authorization", _RETRY_HEADER)}


def _only(method: str, wanted: str) -> None:
    if method != wanted:
        raise ApiError(405, "method_not_allowed", f"use {wanted}")
