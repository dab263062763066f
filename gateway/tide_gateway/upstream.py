"""What the gateway says to an environment server, and what its answers are worth.

A call ends in the contract's answer or in one of two faults: the server is there and answered wrongly
(`EnvironmentFailed`), or it is gone with all that it knew (`EnvironmentLost`). A broken connection alone is neither:
the call is sent again, but only to the same incarnation, whose server answers a repeated turn from its record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from tide_gateway.plain import few_brackets, plain_answer
from tide_gateway.runtimes import Server
from tide_sdk import codec
from tide_sdk.clocks import ClockName
from tide_sdk.http import ConnectFailed, DeadlineExceeded, ProtocolFailed, QueueFull, TransportError
from tide_sdk.http_parse import Response
from tide_sdk.wire import MAX_LIMIT_S, EndResponse, EpochResponse, HealthResponse, ObservationResponse, StartResponse

MAX_RESENDS = 5
TRY_S = 15.0
"""Seconds after which a call without an answer is sent again: what a network swallowed never comes."""
PROBE_TIMEOUT_S = 5.0
MAX_WORDS = 1000
"""Characters of a server's own words that are kept in rows and answers."""
_RESEND_PAUSE_S = 0.05
_MAX_RESEND_PAUSE_S = 1.0
_CAPACITY_PAUSE_S = 0.1

M = TypeVar("M", bound=BaseModel)


class EnvironmentFailed(Exception):
    """The server answered, but not with what the contract asks for.

    Attributes:
        status: its HTTP status.
        code: the contract's code, if the answer had one.
        refused: for the code `invalid`, the field at fault and the server's own words, `field: words`.
    """

    def __init__(self, status: int, code: str, detail: str, refused: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.refused = refused


class EnvironmentLost(Exception):
    """The server that held the task is gone, or does not know it any more."""


class Observed(NamedTuple):
    """What an environment's answer means for the task."""

    turn: int
    terminated: bool
    truncated: bool


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
            return _parse(StartResponse, await _call(server, "/start", codec.dumps(request), deadline_s - loop.time()))
        except EnvironmentFailed as error:
            if error.code != "capacity" or loop.time() + _CAPACITY_PAUSE_S >= deadline_s:
                raise
        await asyncio.sleep(_CAPACITY_PAUSE_S)


async def observe(
    server: Server, peer_task: str, turn: int, action: bytes, timeout_s: float
) -> tuple[Observed, dict[str, Any]]:
    """Send the action of a turn, a message as JSON; the server acts on it at most once."""
    body = b'{"task_id":%b,"turn":%d,"message":%b}' % (codec.dumps(peer_task), turn, action)
    response = await _call(server, "/observation", body, timeout_s)
    data = _data_of(response)
    plain = plain_answer(data) if few_brackets(response.body) else None
    if plain is not None:
        seen = Observed(*plain)
    else:
        answer = _check(ObservationResponse, response)
        seen = Observed(answer.turn, answer.terminated, answer.truncated)
    if seen.turn != turn + 1:
        raise EnvironmentFailed(200, "", f"the environment answered turn {turn} with turn {seen.turn}")
    return seen, data


async def pause(server: Server, peer_task: str, *, paused: bool, epoch: int, timeout_s: float) -> None:
    """Stop or start the server's own clocks of a task."""
    path = "/pause" if paused else "/resume"
    body = codec.dumps({"task_id": peer_task, "epoch": epoch})
    _parse(EpochResponse, await _call(server, path, body, timeout_s))


async def end(server: Server, peer_task: str, reason: str, timeout_s: float) -> tuple[float | None, Mapping[str, Any]]:
    """End a task and read its account: reward and metrics, the latter as the codec reads them, so that it can write
    them again."""
    body = codec.dumps({"task_id": peer_task, "reason": reason})
    answer, data = _parse(EndResponse, await _call(server, "/end", body, timeout_s))
    return answer.reward, data["metrics"]


async def _call(server: Server, path: str, body: bytes, timeout_s: float) -> Response:
    """One call with resends over broken connections; every call of the contract may be repeated.

    Raises:
        EnvironmentFailed, EnvironmentLost: see there.
        TimeoutError: the deadline passed; the server may have acted.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    num_broken, begun_s = 0, perf_counter()
    while num_broken < MAX_RESENDS and not server.exited.is_set():
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            raise TimeoutError
        try:
            response = await server.channel.request("POST", path, body, timeout_s=min(left_s, TRY_S), idempotent=True)
        except DeadlineExceeded as error:
            if left_s <= TRY_S:
                raise TimeoutError from error
            # It may only take its time: then the server joins the two.
            await _same_incarnation(server, deadline_s)
            continue
        except QueueFull as error:
            raise EnvironmentFailed(503, "", "too many calls to the environment server wait") from error
        except ProtocolFailed as error:
            # It is there, and would say the same again.
            raise EnvironmentFailed(0, "", f"the environment's answer cannot be read: {error}") from error
        except TransportError as error:
            # A server that is too busy to take a connection has not seen the call.
            num_broken += not isinstance(error, ConnectFailed)
            await _same_incarnation(server, deadline_s)
            continue
        server.took(path, perf_counter() - begun_s)
        return response
    raise EnvironmentLost("the environment server is gone")


async def _same_incarnation(server: Server, deadline_s: float) -> None:
    """Return once the same incarnation answers again.

    Raises:
        EnvironmentLost: it is gone or was restarted.
        TimeoutError: the deadline passed while it did not answer.
    """
    loop = asyncio.get_running_loop()
    pause_s = _RESEND_PAUSE_S
    while not server.exited.is_set():
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            raise TimeoutError
        await asyncio.sleep(min(pause_s, left_s))
        try:
            await probe(server, max(0.001, min(deadline_s - loop.time(), PROBE_TIMEOUT_S)))
            return
        except (TransportError, EnvironmentFailed):
            # Whether it is lost is for its keeper to say, whose probes end in `exited`.
            pause_s = min(_MAX_RESEND_PAUSE_S, 2.0 * pause_s)
    raise EnvironmentLost("the environment server is gone")


def _parse(model: type[M], response: Response) -> tuple[M, dict[str, Any]]:
    data = _data_of(response)
    return _check(model, response), data


def _data_of(response: Response) -> dict[str, Any]:
    try:
        data = codec.loads(response.body)
    except codec.CodecError:
        data = None
    if response.status >= 400:
        problem: dict[str, Any] = data if isinstance(data, dict) else {}
        words = str(problem.get("detail") or response.body[:200].decode("utf-8", "replace"))[:MAX_WORDS]
        code = str(problem.get("code", ""))
        if code in ("not_found", "environment_lost") or (response.status == 404 and not code):
            raise EnvironmentLost("the environment server does not know the task any more")
        refused = ""
        if code == "invalid":
            field = str(problem.get("field") or "task")[:128]
            refused = words if words.startswith(f"{field}: ") else f"{field}: {words}"
        raise EnvironmentFailed(response.status, code, f"the environment answered {response.status}: {words}", refused)
    if not isinstance(data, dict):
        raise EnvironmentFailed(response.status, "", "the environment's answer is not a JSON object")
    return data


def _check(model: type[M], response: Response) -> M:
    try:
        # Strict, because what agents get is the answer as it was sent: "no" must not pass for false there.
        return model.model_validate_json(response.body, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in fault["loc"]) or "body"
        words = f"the environment's answer is not the contract's: {field}: {fault['msg']}"
        raise EnvironmentFailed(response.status, "", words) from error
