"""The views: tasks, environments, capacity and health, as FastAPI routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict

from tide_gateway.auth import Owners
from tide_gateway.fleet import Fleet
from tide_gateway.repository import Instance
from tide_gateway.repository.slots import Slots
from tide_gateway.runtimes import Place
from tide_gateway.service.tasks import TaskService
from tide_sdk.clocks import TaskState
from tide_sdk.wire import CapacityView, HeartbeatRequest, HeartbeatResponse, Limits, TaskView

MAX_PAGE = 500


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
    """One registered environment."""

    name: str
    runtime: str
    capacity: int
    taken: int
    limits: Limits
    servers: list[ServerView]


class HealthView(View):
    """The gateway answers."""

    status: str
    replica: str


def make_router(service: TaskService, owners: Owners) -> APIRouter:
    """The routes of the views."""
    router = APIRouter()

    def owner_of(request: Request) -> str:
        header = request.headers.get("authorization")
        return owners.owner(None if header is None else header.encode("latin-1"))

    @router.get("/healthz", tags=["operation"])
    async def healthz() -> HealthView:
        """Whether the gateway answers; needs no token."""
        return HealthView(status="ok", replica=service.replica)

    @router.get("/tasks", tags=["tasks"])
    async def tasks(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        after: Annotated[str | None, Query(max_length=128)] = None,
        state: TaskState | None = None,
        environment: Annotated[str | None, Query(max_length=128)] = None,
    ) -> TaskPage:
        """Your tasks, newest first."""
        owner = owner_of(request)
        page = await service.tasks(owner, limit=limit, after=after, state=state, environment=environment)
        return TaskPage(tasks=page, next=page[-1].task_id if len(page) == limit else None)

    @router.get("/tasks/{task_id}", tags=["tasks"])
    async def task(request: Request, task_id: str) -> TaskView:
        """One of your tasks."""
        return await service.task(owner_of(request), task_id)

    @router.get("/tasks/{task_id}/events", tags=["tasks"])
    async def events(request: Request, task_id: str) -> list[EventView]:
        """The history of one of your tasks, oldest first; turns are not in it."""
        history = await service.history(owner_of(request), task_id)
        return [EventView(kind=kind, at_s=at_s, detail=detail) for kind, at_s, detail in history]

    @router.get("/environments", tags=["environments"])
    async def environments(request: Request) -> list[EnvironmentView]:
        """The registered environments and their servers."""
        owner_of(request)
        slots, servers = await service.slots(owner_of(request)), await service.servers()
        return [_environment(fleet, slots[name].taken, servers) for name, fleet in service.fleets.items()]

    @router.get("/capacity", tags=["environments"])
    async def capacity(request: Request) -> dict[str, CapacityView]:
        """Free slots by environment."""
        slots = await service.slots(owner_of(request))
        return {name: _capacity(fleet, slots[name]) for name, fleet in service.fleets.items()}

    @router.post("/heartbeat", tags=["operation"])
    async def heartbeat(request: Request, beat: HeartbeatRequest) -> HeartbeatResponse:
        """Promise to call again within `timeout_s`; null withdraws the promise."""
        num_tasks = await service.heartbeat(owner_of(request), beat.prefix, beat.timeout_s)
        return HeartbeatResponse(owner_tasks=num_tasks, timeout_s=beat.timeout_s)

    return router


def _environment(fleet: Fleet, taken: int, servers: list[tuple[Instance, Place | None, int]]) -> EnvironmentView:
    return EnvironmentView(
        name=fleet.spec.name,
        runtime=fleet.spec.runtime,
        capacity=fleet.capacity,
        taken=taken,
        limits=fleet.spec.all_limits,
        servers=[
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
