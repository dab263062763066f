"""The router's HTTP side: a plain ASGI application, no framework on the way of a turn.

POST /sessions/{session}/v1/chat/completions    GET /sessions/{session}/v1/models
POST /sessions/{session}/v1/completions         GET /sessions/{session}/v1/models/{id}
PUT  /sessions/{session}/v1/images/{sha256}     POST /footprints, GET /health

docs/router.md says what is refused, and why.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Iterable, Mapping
from typing import cast

from tide_sdk import asgi, codec
from tide_sdk.errors import TideError
from tide_sdk.images import MAX_IMAGE_BYTES, is_digest
from tide_trainer.router.calls import Calls, Notify
from tide_trainer.router.control import Control
from tide_trainer.router.model_calls import ENDPOINTS, RETRY_HEADER, ModelCalls
from tide_trainer.router.openai_answers import write_model, write_models
from tide_trainer.router.openai_wire import ApiError, now_s
from tide_trainer.router.outlet import Outlet, disconnected
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.reports import Reports
from tide_trainer.router.state import Flight, Limits, Session

_LOG = logging.getLogger(__name__)
_PREFIX = "/sessions/"
_VERSION = "/v1/"
_MODEL = "models/"
_IMAGE = "images/"


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
        self._model_calls = ModelCalls(calls, renderer, limits)
        self._reports = Reports(control, calls, notify, limits)
        self.closing = False

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """ASGI's entry."""
        if scope["type"] != "http":
            return
        outlet = Outlet(send, scope.get(asgi.WHOLE))
        try:
            try:
                if self.closing:
                    raise ApiError(503, "shutting_down", "the router is shutting down", kind="server_error")
                await self._route(scope, receive, outlet)
            except ApiError as error:
                await outlet.error(error)
            except TideError as error:
                await outlet.error(ApiError(error.status, error.code, error.detail, param=error.extra.get("field")))
            except asgi.ClientGone:
                raise
            except Exception:  # noqa: BLE001 - the boundary of HTTP: logged, and answered
                _LOG.exception("%s %s failed", scope["method"], scope["path"])
                words = "unexpected failure in the router; see its log"
                await outlet.error(ApiError(500, "internal", words, kind="server_error"))
        except asgi.ClientGone:
            return

    def close(self) -> None:
        """Refuse what comes and cancel what is in flight."""
        self.closing = self._calls.closing = True
        for session in self._control.sessions.values():
            for flight in session.flights.values():
                flight.task.cancel()

    async def _route(self, scope: asgi.Scope, receive: asgi.Receive, outlet: Outlet) -> None:
        path, method = cast("str", scope["path"]), scope["method"]
        name, found, endpoint = path.removeprefix(_PREFIX).rpartition(_VERSION)
        if path.startswith(_PREFIX) and found and endpoint in ENDPOINTS:
            _only(method, "POST")
            headers = _wanted_headers(scope)
            session = self._session(name, headers)
            body = await asgi.read_body(scope, receive, self._limits.max_body_bytes)
            await self._model_calls.serve(session, endpoint, body, headers, receive, outlet)
        elif path.startswith(_PREFIX) and found and endpoint.startswith(_IMAGE):
            _only(method, "PUT")
            await self._image(self._session(name, _wanted_headers(scope)), endpoint, scope, receive, outlet)
        elif path.startswith(_PREFIX) and found and (endpoint + "/").startswith(_MODEL):
            _only(method, "GET")
            await outlet.whole(self._models(self._session(name, _wanted_headers(scope)), endpoint))
        elif path == "/footprints":
            _only(method, "POST")
            await self._footprints(scope, receive, outlet)
        elif path == "/health":
            _only(method, "GET")
            body = {"status": "ok", "sessions": len(self._control.sessions), "held": self._calls.num_held}
            await outlet.whole(codec.dumps(body | {"running": len(self._calls.generations)}))
        else:
            raise ApiError(404, "not_found", f"no endpoint {path}")

    async def _image(
        self, session: Session, endpoint: str, scope: asgi.Scope, receive: asgi.Receive, outlet: Outlet
    ) -> None:
        digest = endpoint.removeprefix(_IMAGE)
        if not is_digest(digest):
            raise ApiError(400, "invalid_image", "name the image by the SHA-256 of its bytes, 64 lower-case hex digits")
        most = min(MAX_IMAGE_BYTES, self._limits.max_body_bytes)

        async def read() -> bytes:
            return await asgi.read_body(scope, receive, most, media_type=b"image/")

        num_tokens = await self._calls.images.put(session.capture.images, digest, read)
        session.used_s = time.monotonic()
        await outlet.whole(codec.dumps({"digest": digest, "num_tokens": num_tokens}))

    def _models(self, session: Session, endpoint: str) -> bytes:
        wanted = endpoint.removeprefix(_MODEL.rstrip("/")).removeprefix("/")
        if not wanted:
            return write_models(self._model, self._created, session.max_context_tokens)
        if wanted != self._model:
            raise ApiError(404, "model_not_found", f"no model {wanted!r}; this is {self._model!r}", param="model")
        return write_model(self._model, self._created, session.max_context_tokens)

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

    async def _footprints(self, scope: asgi.Scope, receive: asgi.Receive, outlet: Outlet) -> None:
        given = _wanted_headers(scope).get(b"authorization", b"")
        body = await asgi.read_body(scope, receive, self._limits.max_body_bytes)
        told = await self._reports.answer(given, body, lambda flight: self._passed(flight, receive))
        await outlet.whole(codec.dumps(told))

    async def _passed(self, flight: Flight, receive: asgi.Receive) -> None:
        """Returns when the flight is over; a client that goes away leaves it, and the last one to leave cancels it."""
        flight.num_waiting += 1
        gone = asyncio.create_task(disconnected(receive))
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
        flight.task.result()


def _wanted_headers(scope: asgi.Scope) -> dict[bytes, bytes]:
    pairs = cast("Iterable[tuple[bytes, bytes]]", scope["headers"])
    return {name: value for name, value in pairs if name in (b"authorization", RETRY_HEADER)}


def _only(method: str, wanted: str) -> None:
    if method != wanted:
        raise ApiError(405, "method_not_allowed", f"use {wanted}")
