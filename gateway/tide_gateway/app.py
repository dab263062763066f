"""The gateway's HTTP application: the contract's lean app in front, FastAPI for the rest."""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from tide_gateway.auth import Owners
from tide_gateway.endpoints.accounts import make_accounts_router
from tide_gateway.endpoints.browsers import refuse_strange_pages
from tide_gateway.endpoints.calls import HELD
from tide_gateway.endpoints.contract import PATHS, ContractApp, storage_failed
from tide_gateway.endpoints.openapi import add_contract
from tide_gateway.endpoints.operation import make_operation_router
from tide_gateway.endpoints.page import add_page
from tide_gateway.endpoints.sending import HeldSend
from tide_gateway.endpoints.views import make_router
from tide_gateway.load import Held, Load, LoadLimits
from tide_gateway.log_lines import environment_worked_on, request_scope
from tide_gateway.repository import StorageFailed
from tide_gateway.scrubbing import scrub
from tide_gateway.service.tasks import TaskService
from tide_sdk.asgi import ClientGone, Receive, Scope, Send, send_problem
from tide_sdk.errors import TideError

log = logging.getLogger(__name__)

TITLE = "TideRL environment gateway"
_CALLS = {
    ("POST", "/start"): "start",
    ("POST", "/observation"): "turn",
    ("POST", "/pause"): "pause",
    ("POST", "/resume"): "resume",
    ("POST", "/end"): "end",
}
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "media_type"}


class ProblemResponse(Response):
    """A contract error as an ASGI response."""

    def __init__(self, error: TideError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        await send_problem(send, self._error)


class GatewayApp:
    """The ASGI application.

    Args:
        service: opened and stopped by whoever runs the server.
        owners: who calls.
        logs: the folder of the environment servers' log files; None where there is none.
        limits: what all callers together may hold.
    """

    def __init__(
        self, service: TaskService, owners: Owners, logs: Path | None = None, limits: LoadLimits | None = None
    ) -> None:
        self._owners = owners
        self._metrics = service.metrics
        self._contract = ContractApp(service, owners)
        self._views = make_views(service, owners, logs)
        self.load = Load(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count it; what it holds is given back however it ends."""
        if scope["type"] != "http":
            await self._views(scope, receive, send)
            return
        request_scope.set(scope)
        begun_s = perf_counter()
        held = scope[HELD] = Held(self.load)
        sending = HeldSend(send, held)
        self._metrics.num_in_flight += 1
        try:
            await refuse_strange_pages(scope, self._owners)
            await (self._contract if scope["path"] in PATHS else self._views)(scope, receive, sending)
        except TideError as error:
            await send_problem(sending, error)
        finally:
            held.leave()
            self._metrics.num_in_flight -= 1
            self._count(scope, sending.status, begun_s)

    def _count(self, scope: Scope, status: int, begun_s: float) -> None:
        path = scope["path"]
        if path not in PATHS:
            # A template, as /tasks/{task_id}: labels have no names of tasks, nor what somebody tries out.
            path = getattr(scope.get("route"), "path", "other")
        elif 200 <= status < 300 and (call := _CALLS.get((scope["method"], path))) is not None:
            self._metrics.calls.of(call, environment_worked_on()).observe(perf_counter() - begun_s)
        self._metrics.requests.add(path, status or "gone")


def make_views(service: TaskService, owners: Owners, logs: Path | None = None) -> FastAPI:
    """The FastAPI application: views, OpenAPI of everything, problem+json for its errors."""
    # No redirects: behind a proxy with TLS they would lead out of it.
    app = FastAPI(title=TITLE, version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(make_operation_router(service, owners))
    app.include_router(make_router(service, owners, logs))
    app.include_router(make_accounts_router(owners))
    add_contract(app)
    add_page(app)

    @app.exception_handler(TideError)
    async def _tide(_request: Request, error: TideError) -> Response:  # pyright: ignore[reportUnusedFunction]
        return ProblemResponse(error)

    @app.exception_handler(StorageFailed)
    async def _storage(_request: Request, error: StorageFailed) -> Response:  # pyright: ignore[reportUnusedFunction]
        return ProblemResponse(storage_failed(error))

    @app.exception_handler(ClientGone)
    async def _gone(_request: Request, _error: ClientGone) -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> Response:  # pyright: ignore[reportUnusedFunction]
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"][1:]) or "request"
        return ProblemResponse(TideError("invalid", f"{field}: {fault['msg']}", field=field))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:  # pyright: ignore[reportUnusedFunction]
        code = _CODE_OF_STATUS.get(error.status_code, "invalid")
        words = f"no such path: {scrub(request.url.path)[:200]}" if code == "not_found" else str(error.detail)
        # Of all routes of the path: the framework names the methods of the first one only.
        extra: dict[str, Any] = {"allow": _allowed(app, request)} if error.status_code == 405 else {}
        if code == "invalid":
            extra["field"] = "request"
        return ProblemResponse(TideError(code, words, **extra))

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        log.error("%s %.200r failed", request.method, request.url.path, exc_info=error)
        return ProblemResponse(TideError("internal", "an unexpected failure; see the gateway's log"))

    return app


def _allowed(app: FastAPI, request: Request) -> str:
    found = {
        method
        for route in app.routes
        if isinstance(route, Route) and route.path_regex.match(request.url.path)
        for method in route.methods or ()
    }
    return ", ".join(sorted(found))
