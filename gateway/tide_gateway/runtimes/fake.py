"""A scripted environment server in this process: deterministic, for tests and for measuring the gateway alone.

`ScriptedEnvironment` is the server without a network, so that a test can put the same script behind a real socket.
What a task does follows from its parameters (`Script`); `info["effects"]` counts what really happened.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tide_gateway.runtimes import LaunchFailed, Place, Server
from tide_gateway.specs import EnvironmentSpec
from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.http import ConnectFailed, DeadlineExceeded, Disconnected
from tide_sdk.http_parse import Response
from tide_sdk.wire import CONTRACT_VERSION, HealthResponse

_CLOCKS = {
    name: {"limit_s": 1.0, "consumed_s": 0.0, "remaining_s": 1.0} for name in ("start", "idle", "turn", "active", "end")
}
_LIMITS = dict.fromkeys(_CLOCKS, 1.0)


class Script(BaseModel):
    """Parameters of a scripted task.

    Attributes:
        turns: the task terminates with this turn; 0 never.
        truncate: it is truncated instead of terminated.
        reward: reward of the last turn.
        step_s: seconds that each action takes.
        start_s: seconds that the start takes.
        end_s: seconds that the end takes.
        hang_turn: the action of this turn never ends.
        fail_turn: the action of this turn answers HTTP 500.
        garbage_turn: the action of this turn answers something that is not the contract's.
        die_turn: the server dies after the action of this turn took effect, before it answers.
        drop_turn: the connection of this turn breaks once after the action took effect.
        refuse: the start is refused as invalid.
        text_bytes: size of each observation's text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: int = 0
    truncate: bool = False
    reward: float = 1.0
    step_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    hang_turn: int | None = None
    fail_turn: int | None = None
    garbage_turn: int | None = None
    die_turn: int | None = None
    drop_turn: int | None = None
    refuse: bool = False
    text_bytes: int = 2


@dataclass(slots=True)
class _Scripted:
    task_id: str
    script: Script
    effects: int = 0
    turn: int = 0
    reward: float = 0.0
    paused: bool = False
    dropped: bool = False
    calls: list[str] = field(default_factory=list[str])
    acting: asyncio.Task[dict[str, Any]] | None = None
    answers: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])


class ServerDied(Exception):
    """The script says that the server dies now."""


class ScriptedEnvironment:
    """The five endpoints and `/health`, without a network.

    Args:
        capacity: tasks at once.
    """

    def __init__(self, capacity: int = 64) -> None:
        self.incarnation = secrets.token_hex(8)
        self.capacity = capacity
        self.tasks: dict[str, _Scripted] = {}
        self.keys: dict[str, str] = {}
        self.accounts: dict[str, dict[str, Any]] = {}

    async def handle(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        """Answer one request: status and JSON body.

        Raises:
            ServerDied: a script ends the server here.
        """
        if method == "GET" and path == "/health":
            return 200, self.health().model_dump()
        data = codec.loads(body or b"{}")
        try:
            if path == "/start":
                return 201, await self._start(data)
            task = self.tasks.get(data["task_id"])
            if path == "/end" and data["task_id"] in self.accounts:
                return 200, self.accounts[data["task_id"]]
            if task is None:
                raise TideError("not_found", "no such task")
            if path == "/observation":
                return 200, await self._observe(task, data["turn"])
            if path in ("/pause", "/resume"):
                task.calls.append(path)
                task.paused = path == "/pause"
                return 200, {"state": "paused" if task.paused else "waiting", "epoch": 1, "clocks": _CLOCKS}
            if path == "/end":
                return 200, await self._end(task)
        except TideError as error:
            return error.status, error.problem().model_dump()
        return 404, {"detail": "no such path"}

    def health(self) -> HealthResponse:
        """What `GET /health` answers."""
        return HealthResponse(
            contract=CONTRACT_VERSION,
            environment="scripted",
            capacity=self.capacity,
            tasks=len(self.tasks),
            incarnation=self.incarnation,
        )

    async def _start(self, data: dict[str, Any]) -> dict[str, Any]:
        try:
            script = Script.model_validate(data.get("task") or {})
        except ValidationError as error:
            raise TideError("invalid", f"task: {error.errors()[0]['msg']}", field="task") from error
        if script.refuse:
            raise TideError("invalid", "task.refuse: the script refuses to start", field="task.refuse")
        task_id = self.keys.get(data["key"])
        if task_id is None:
            task_id = f"s{len(self.keys)}"
            self.keys[data["key"]] = task_id
            self.tasks[task_id] = _Scripted(task_id, script)
        await asyncio.sleep(script.start_s)
        first = [{"role": "user", "content": "o" * script.text_bytes}]
        return {
            "task_id": task_id, "turn": 0, "messages": first, "tools": [], "limits": _LIMITS, "clocks": _CLOCKS,
        }  # fmt: skip

    async def _observe(self, task: _Scripted, turn: int) -> dict[str, Any]:
        if turn in task.answers:
            return task.answers[turn]
        if task.paused:
            raise TideError("paused", "the task is paused")
        if task.acting is None:
            if turn != task.turn:
                raise TideError("turn_order", f"turn {task.turn} is next")
            task.acting = asyncio.create_task(self._act(task, turn))
        return await asyncio.shield(task.acting)

    async def _act(self, task: _Scripted, turn: int) -> dict[str, Any]:
        script = task.script
        task.effects += 1
        if script.hang_turn == turn:
            await asyncio.Event().wait()
        if script.step_s:
            await asyncio.sleep(script.step_s)
        last = script.turns > 0 and turn + 1 >= script.turns
        reward = script.reward if last else 0.0
        task.reward += reward
        task.turn += 1
        answer: dict[str, Any] = {
            "turn": turn + 1,
            "messages": [{"role": "user", "content": "o" * script.text_bytes}],
            "reward": reward,
            "terminated": last and not script.truncate,
            "truncated": last and script.truncate,
            "info": {"effects": task.effects},
            "clocks": _CLOCKS,
        }
        task.answers = {turn: answer}
        task.acting = None
        if script.die_turn == turn:
            raise ServerDied
        if script.fail_turn == turn:
            raise TideError("internal", "the script fails this turn")
        if script.drop_turn == turn and not task.dropped:
            task.dropped = True
            raise ConnectionResetError
        return {"nonsense": True} if script.garbage_turn == turn else answer

    async def _end(self, task: _Scripted) -> dict[str, Any]:
        if task.acting is not None:
            task.acting.cancel()
        await asyncio.sleep(task.script.end_s)
        self.tasks.pop(task.task_id, None)
        account = {"reward": task.reward, "metrics": {"effects": task.effects}, "turns": task.turn}
        self.accounts[task.task_id] = account | {"clocks": _CLOCKS, "outcome": {"kind": "completed"}}
        return self.accounts[task.task_id]


class FakeChannel:
    """Calls a `ScriptedEnvironment` in the same process, as if over a network."""

    def __init__(self, environment: ScriptedEnvironment, exited: asyncio.Event) -> None:
        self._environment = environment
        self._exited = exited

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> Response:
        """Make one call; it fails as a network would where the server is gone or the script says so."""
        if self._exited.is_set():
            raise ConnectFailed("the fake server is gone")
        call = asyncio.ensure_future(self._environment.handle(method, path, body))
        gone = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({call, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                if gone.done():
                    raise Disconnected("the fake server is gone")
                raise DeadlineExceeded(f"{method} {path} took longer than {timeout_s} s")
            status, data = call.result()
        except ServerDied as error:
            self._exited.set()
            raise Disconnected("the fake server died") from error
        except ConnectionResetError as error:
            raise Disconnected("the fake connection broke") from error
        finally:
            call.cancel()
            gone.cancel()
        return Response(status, {}, codec.dumps(data))

    async def aclose(self) -> None:
        """Nothing to close."""


class FakeRuntime:
    """Launches scripted environments in this process.

    Attributes:
        launched: every environment so far, by instance name.
        num_failures: that many launches from now on fail.
        launch_s: seconds that a launch takes.
    """

    def __init__(self) -> None:
        self.launched: dict[str, ScriptedEnvironment] = {}
        self.servers: dict[str, Server] = {}
        self.num_failures = 0
        self.launch_s = 0.0

    async def launch(self, name: str, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """See `Runtime.launch`."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.launch_s)
        except TimeoutError:
            raise LaunchFailed(f"the fake server was not healthy within {timeout_s:g} s") from None
        if self.num_failures > 0:
            self.num_failures -= 1
            raise LaunchFailed("the fake server fails to launch")
        environment = ScriptedEnvironment(spec.tasks_per_server)
        exited = asyncio.Event()
        server = Server(name, FakeChannel(environment, exited), environment.health(), Place(f"fake:{name}"), exited)
        self.launched[name] = environment
        self.servers[name] = server
        return server

    async def destroy(self, server: Server, grace_s: float) -> None:
        """See `Runtime.destroy`."""
        server.exited.set()
        self.servers.pop(server.name, None)

    async def remove_leftovers(self, names: Iterable[str]) -> int:
        """Nothing outlives this process."""
        return 0

    async def close(self) -> None:
        """See `Runtime.close`."""
        for server in list(self.servers.values()):
            await self.destroy(server, 0.0)
