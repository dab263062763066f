"""For those who run the gateway: whether it lives, whether it is ready, and its metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict

from tide_gateway.auth import Owners
from tide_gateway.endpoints.scrape import Scrape
from tide_gateway.service.tasks import TaskService
from tide_sdk.errors import TideError

RETRY_S = 1
_Up = Literal["up", "away"]


class HealthView(BaseModel):
    """The gateway answers."""

    model_config = ConfigDict(frozen=True)

    status: str
    replica: str


class ReadyView(BaseModel):
    """The gateway serves tasks; a runtime may be away while another one is up."""

    model_config = ConfigDict(frozen=True)

    status: Literal["ready"]
    replica: str
    database: _Up
    runtimes: dict[str, _Up]


def make_operation_router(service: TaskService, owners: Owners) -> APIRouter:
    """The routes of health, readiness and metrics.

    Args:
        service: whose they are.
        owners: who asks for metrics.
    """
    router = APIRouter(tags=["operation"])
    scrape = Scrape(service, version("tiderl"))

    @router.get("/healthz")
    async def healthz() -> HealthView:
        """Whether the gateway answers; needs no key."""
        return HealthView(status="ok", replica=service.replica)

    @router.get("/readyz")
    async def readyz() -> ReadyView:
        """Whether the gateway serves tasks now; needs no key. 503 `unavailable` names in `away` what is missing."""
        parts = await service.readiness.parts()
        if parts.faults:
            words = f"not ready: {', '.join(parts.faults)}"
            raise TideError("unavailable", words, retry_after_s=RETRY_S, away=parts.faults)
        runtimes: dict[str, _Up] = {name: "up" if up else "away" for name, up in parts.runtimes.items()}
        return ReadyView(status="ready", replica=service.replica, database="up", runtimes=runtimes)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """What is counted, in Prometheus' text format; for operators."""
        header = request.headers.get("authorization")
        caller = await owners.as_last_known(None if header is None else header.encode("latin-1"))
        caller.require("operator")
        return Response(await scrape.text(), headers={"content-type": CONTENT_TYPE_LATEST, "cache-control": "no-store"})

    return router
