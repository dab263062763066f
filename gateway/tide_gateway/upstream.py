"""What the gateway says to an environment server, and what its answers are worth.

A call ends in the contract's answer or in one of two faults: the server is there and answered wrongly
(`EnvironmentFailed`), or it is gone with all that it knew (`EnvironmentLost`). A broken connection alone is neither:
the call is sent again, but only to the same incarnation, whose server answers a repeated turn from its record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tide_gateway.runtimes import Server
from tide_sdk import codec
from tide_sdk.clocks import ClockName
from tide_sdk.http import DeadlineExceeded, QueueFull, TransportError
from tide_sdk.http_parse import Response
from tide_sdk.wire import MAX_LIMIT_S, EndResponse, EpochResponse, HealthResponse, ObservationResponse, StartResponse

MAX_RESENDS = 5
PROBE_TIMEOUT_S = 5.0
_RESEND_PAUSE_S = 0.05
_CAPACITY_PAUSE_S = 0.1

M = TypeVar("M", bound=BaseModel)


class EnvironmentFailed(Exception):
    """The server answered, but not with what the contract asks for.

    Attributes:
        status: its HTTP status.
        code: the contract's code, if the answer had one.
    """

    def __init__(self, status: int, code: str, detail: str, extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.extra = dict(extra or {})


class EnvironmentLost(Exception):
    """The server that held the task is gone, or does not know it any more."""


def peer_limits(limits: Mapping[ClockName, float]) -> dict[str, float]:
    """Limits for the environment server's own clocks: looser than the gateway's, which decides.

    They only matter when no gateway is left to end the task.
    """
    return {name.value: min(MAX_LIMIT_S, 1.5 * seconds + 60.0) for name, seconds in limits.items()}


async def probe(server: Server, timeout_s: float = PROBE_TIMEOUT_S) -> HealthResponse:
    """The server's health.

    Raises:
        TransportError: no answer.
        EnvironmentLost: another incarnation answered.
        EnvironmentFailed: not the contract's answer.
    """
    response = await server.channel.request("GET", "/health", timeout_s=timeout_s, idempotent=True)
    health = _parse(HealthResponse, response)[0]
    if health.incarnation != server.health.incarnation:
        raise EnvironmentLost("the environment server was restarted")
    return health


async def start(server: Server, request: Mapping[str, Any], timeout_s: float) -> tuple[StartResponse, dict[str, Any]]:
    """Start a task; the server's capacity may lag behind ours, so a full server is asked again until the deadline."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        try:
            return await _call(server, "/start", request, StartResponse, deadline_s - loop.time())
        except EnvironmentFailed as error:
            if error.code != "capacity" or loop.time() + _CAPACITY_PAUSE_S >= deadline_s:
                raise
        await asyncio.sleep(_CAPACITY_PAUSE_S)


async def observe(
    server: Server, peer_task: str, turn: int, message: Mapping[str, Any], timeout_s: float
) -> tuple[ObservationResponse, dict[str, Any]]:
    """Send the action of a turn; the server acts on it at most once."""
    body = {"task_id": peer_task, "turn": turn, "message": message}
    answer, data = await _call(server, "/observation", body, ObservationResponse, timeout_s)
    if answer.turn != turn + 1:
        raise EnvironmentFailed(200, "", f"the environment answered turn {turn} with turn {answer.turn}")
    return answer, data


async def pause(server: Server, peer_task: str, *, paused: bool, epoch: int, timeout_s: float) -> None:
    """Stop or start the server's own clocks of a task."""
    path = "/pause" if paused else "/resume"
    await _call(server, path, {"task_id": peer_task, "epoch": epoch}, EpochResponse, timeout_s)


async def end(server: Server, peer_task: str, reason: str, timeout_s: float) -> EndResponse:
    """End a task and read its account."""
    return (await _call(server, "/end", {"task_id": peer_task, "reason": reason}, EndResponse, timeout_s))[0]


async def _call(
    server: Server, path: str, payload: Mapping[str, Any], model: type[M], timeout_s: float
) -> tuple[M, dict[str, Any]]:
    """One call with resends over broken connections; every call of the contract may be repeated.

    Raises:
        EnvironmentFailed, EnvironmentLost: see there.
        TimeoutError: the deadline passed; the server may have acted.
    """
    body = codec.dumps(payload)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    for _ in range(MAX_RESENDS):
        if server.exited.is_set():
            break
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            raise TimeoutError
        try:
            response = await server.channel.request("POST", path, body, timeout_s=left_s, idempotent=True)
        except DeadlineExceeded as error:
            raise TimeoutError from error
        except QueueFull as error:
            raise EnvironmentFailed(503, "", "too many calls to the environment server wait") from error
        except TransportError:
            await _same_incarnation(server, deadline_s)
            continue
        return _parse(model, response)
    raise EnvironmentLost("the environment server is gone")


async def _same_incarnation(server: Server, deadline_s: float) -> None:
    """Return once the same incarnation answers again.

    Raises:
        EnvironmentLost: it is gone or was restarted.
        TimeoutError: the deadline passed while it did not answer.
    """
    loop = asyncio.get_running_loop()
    for _ in range(MAX_RESENDS):
        await asyncio.sleep(_RESEND_PAUSE_S)
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            raise TimeoutError
        if server.exited.is_set():
            break
        try:
            await probe(server, min(left_s, PROBE_TIMEOUT_S))
        except (TransportError, EnvironmentFailed):
            continue
        return
    raise EnvironmentLost("the environment server is gone")


def _parse(model: type[M], response: Response) -> tuple[M, dict[str, Any]]:
    try:
        data = codec.loads(response.body)
    except codec.CodecError:
        data = None
    if response.status >= 400:
        problem: dict[str, Any] = data if isinstance(data, dict) else {}
        words = problem.get("detail") or response.body[:200].decode("utf-8", "replace")
        code = str(problem.get("code", ""))
        if code in ("not_found", "environment_lost") or (response.status == 404 and not code):
            raise EnvironmentLost("the environment server does not know the task any more")
        extra = {name: problem[name] for name in ("field",) if name in problem}
        raise EnvironmentFailed(response.status, code, f"the environment answered {response.status}: {words}", extra)
    if not isinstance(data, dict):
        raise EnvironmentFailed(response.status, "", "the environment's answer is not a JSON object")
    try:
        return model.model_validate(data), data
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in fault["loc"])
        words = f"the environment's answer is not the contract's: {field}: {fault['msg']}"
        raise EnvironmentFailed(response.status, "", words) from error
