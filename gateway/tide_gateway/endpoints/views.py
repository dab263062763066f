"""The views: tasks, environments and capacity, as FastAPI routes."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict

from tide_gateway.auth import Owners
from tide_gateway.endpoints.calls import caller_of, check, described, small_body_of
from tide_gateway.endpoints.logs import MAX_TAIL_BYTES, read_tail
from tide_gateway.fleet import Fleet
from tide_gateway.repository import Instance
from tide_gateway.repository.slots import Slots
from tide_gateway.runtimes import Place
from tide_gateway.service.tasks import TaskService
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError
from tide_sdk.images import media_type_of
from tide_sdk.wire import PRINTABLE, CapacityView, HeartbeatRequest, HeartbeatResponse, Limits, TaskView

MAX_PAGE = 500
_Word = Annotated[str | None, Query(max_length=128, pattern=PRINTABLE)]
_IMAGE: dict[int | str, dict[str, Any]] = {
    200: {"description": "Its bytes", "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}
}
_TaskId = Annotated[str, Path(max_length=128, pattern=PRINTABLE)]


class View(BaseModel):
    """Base of the answers below."""

    model_config = ConfigDict(frozen=True)


class TaskPage(View):
    """A page of tasks, newest first; `next` is the `after` of the following page, None on the last one."""

    tasks: list[TaskView]
    next: str | None


class EventView(View):
    """One line of a task's history."""

    kind: str
    at_s: float
    detail: str


class ServerView(View):
    """One environment server."""

    name: str
    state: str
    pid: int
    tasks: int


class EnvironmentView(View):
    """One registered environment; its servers are for authors and operators, and None for agents."""

    name: str
    runtime: str
    capacity: int
    taken: int
    limits: Limits
    servers: list[ServerView] | None


def make_router(service: TaskService, owners: Owners, logs: pathlib.Path | None = None) -> APIRouter:
    """The routes of the views.

    Args:
        service: what is viewed.
        owners: who views.
        logs: the folder of the environment servers' log files, `NAME.log`; None where there is none.
    """
    router = APIRouter()
    _add_tasks(router, service, owners)
    _add_blobs(router, service, owners)
    _add_environments(router, service, owners, logs)
    return router


def _add_tasks(router: APIRouter, service: TaskService, owners: Owners) -> None:
    @router.get("/tasks", tags=["tasks"])
    async def tasks(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        after: _Word = None,
        state: TaskState | None = None,
        environment: _Word = None,
        owner: _Word = None,
    ) -> TaskPage:
        """Your tasks, newest first; an operator may name another `owner`."""
        caller = await caller_of(request, owners)
        if owner not in (None, caller.owner):
            caller.require("operator")
        page = await service.tasks(
            owner or caller.owner, limit=limit, after=after, state=state, environment=environment
        )
        return TaskPage(tasks=page, next=page[-1].task_id if len(page) == limit else None)

    @router.get("/tasks/{task_id}", tags=["tasks"])
    async def task(request: Request, task_id: _TaskId) -> TaskView:
        """One of your tasks; an operator sees everyone's."""
        caller = await caller_of(request, owners)
        return await owners.for_task(caller, task_id, lambda owner: service.task(owner, task_id))

    @router.get("/tasks/{task_id}/events", tags=["tasks"])
    async def events(request: Request, task_id: _TaskId) -> list[EventView]:
        """The history of one of your tasks, oldest first; turns are not in it."""
        caller = await caller_of(request, owners)
        history = await owners.for_task(caller, task_id, lambda owner: service.history(owner, task_id))
        return [EventView(kind=kind, at_s=at_s, detail=detail) for kind, at_s, detail in history]


def _add_blobs(router: APIRouter, service: TaskService, owners: Owners) -> None:
    @router.get("/blobs/{digest}", tags=["tasks"], response_class=Response, responses=_IMAGE)
    async def blob(request: Request, digest: Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]) -> Response:
        """An image that one of your tasks shows, by the SHA-256 in its reference; an operator sees everyone's.

        Its ETag is the same digest: a call whose `If-None-Match` has it gets 304.
        """
        caller = await caller_of(request, owners)
        data = await service.image(None if caller.may("operator") else caller.owner, digest)
        headers = {
            "etag": f'"{digest}"',
            "cache-control": "private, max-age=31536000, immutable",
            "x-content-type-options": "nosniff",
            "content-security-policy": "default-src 'none'; sandbox",
        }
        if _matches(request.headers.get("if-none-match", ""), headers["etag"]):
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=media_type_of(data) or "application/octet-stream", headers=headers)


def _matches(if_none_match: str, etag: str) -> bool:
    """Whether the caller has it; a proxy that packs answers marks their tags as weak, which is no other image."""
    return etag in (one.strip().removeprefix("W/") for one in if_none_match.split(",", MAX_PAGE))


def _add_environments(router: APIRouter, service: TaskService, owners: Owners, logs: pathlib.Path | None) -> None:
    @router.get("/environments", tags=["environments"])
    async def environments(request: Request) -> list[EnvironmentView]:
        """The registered environments, and their servers if you are an author or an operator."""
        caller = await caller_of(request, owners)
        slots = await service.slots(caller.owner)
        servers = await service.servers() if caller.may("author") else None
        return [_environment(fleet, slots[name].taken, servers) for name, fleet in service.fleets.items()]

    @router.get("/environments/{name}/servers/{instance}/log", tags=["environments"], response_class=PlainTextResponse)
    async def log(
        request: Request,
        name: Annotated[str, Path(max_length=128)],
        instance: Annotated[str, Path(max_length=128)],
        tail_bytes: Annotated[int, Query(ge=1, le=MAX_TAIL_BYTES)] = 64 * 1024,
    ) -> Response:
        """The end of an environment server's log, for authors and operators."""
        (await caller_of(request, owners)).require("author")
        if name not in service.fleets:
            raise TideError("environment_unknown", "environment: not registered; see GET /environments")
        known = any((row.name, row.environment) == (instance, name) for row, _, _ in await service.servers())
        text = await read_tail(logs, instance, tail_bytes) if known and logs is not None else None
        if text is None:
            raise TideError("not_found", "instance: no such server, or it has no log; see GET /environments")
        headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
        return Response(text, media_type="text/plain; charset=utf-8", headers=headers)

    @router.get("/capacity", tags=["environments"])
    async def capacity(request: Request) -> dict[str, CapacityView]:
        """Free slots by environment."""
        slots = await service.slots((await caller_of(request, owners)).owner)
        return {name: _capacity(fleet, slots[name]) for name, fleet in service.fleets.items()}

    @router.post("/heartbeat", tags=["operation"], openapi_extra=described(HeartbeatRequest))
    async def heartbeat(request: Request) -> HeartbeatResponse:
        """Promise to call again within `timeout_s`; null withdraws the promise."""
        owner = (await caller_of(request, owners)).owner
        beat = check(HeartbeatRequest, await small_body_of(request))
        num_tasks = await service.heartbeat(owner, beat.prefix, beat.timeout_s)
        return HeartbeatResponse(owner_tasks=num_tasks, timeout_s=beat.timeout_s)


def _environment(fleet: Fleet, taken: int, servers: list[tuple[Instance, Place | None, int]] | None) -> EnvironmentView:
    return EnvironmentView(
        name=fleet.spec.name,
        runtime=fleet.spec.runtime,
        capacity=fleet.capacity,
        taken=taken,
        limits=fleet.spec.all_limits,
        servers=None
        if servers is None
        else [
            ServerView(name=row.name, state=row.state.value, pid=place.pid if place else 0, tasks=num_tasks)
            for row, place, num_tasks in servers
            if row.environment == fleet.spec.name
        ],
    )


def _capacity(fleet: Fleet, slots: Slots) -> CapacityView:
    return CapacityView(
        capacity=fleet.capacity,
        taken=slots.taken,
        free=slots.free,
        free_eval=slots.free_eval,
        mine=slots.mine,
        waiting=slots.num_waiting,
        starts_per_s=fleet.spec.start_rate,
    )
