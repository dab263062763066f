"""The scripted environment server without a network: deterministic, for tests and for measuring the gateway alone.

What a task does follows from its parameters (`Script`); `info["effects"]` counts what really happened. The fake runtime
serves it in this process, a test puts the same script behind a real socket.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.images import image
from tide_sdk.wire import CONTRACT_VERSION, HealthResponse

_CLOCKS = {
    name: {"limit_s": 1.0, "consumed_s": 0.0, "remaining_s": 1.0} for name in ("start", "idle", "turn", "active", "end")
}
_LIMITS = dict.fromkeys(_CLOCKS, 1.0)
_MAX_REMEMBERED = 4096


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
        screenshot_bytes: size of the picture in each observation, another one each time; 0 for none.
        spin: from the start on a child process burns a CPU, even after the task's end; only behind a real process.
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
    screenshot_bytes: int = 0
    spin: bool = False

    def message(self, turn: int = 0) -> dict[str, Any]:
        """What the environment says in the observation that turn `turn` follows."""
        text = "o" * self.text_bytes
        if not self.screenshot_bytes:
            return {"role": "user", "content": text}
        # Nobody decodes it on its way; what it begins with is looked at.
        picture = (b"\x89PNG\r\n\x1a\n%d" % turn).ljust(self.screenshot_bytes, b"\0")
        return {"role": "user", "content": [{"type": "text", "text": text}, image(picture)]}


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
        self._number = 0

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
            task_id = f"s{self._number}"
            self._number += 1
            self.keys[data["key"]] = task_id
            _drop_oldest(self.keys)
            self.tasks[task_id] = _Scripted(task_id, script)
        await asyncio.sleep(script.start_s)
        return {
            "task_id": task_id, "turn": 0, "messages": [script.message()], "tools": [], "limits": _LIMITS,
            "clocks": _CLOCKS,
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
        acting = task.acting
        await asyncio.wait({acting})  # a caller that goes away does not stop it
        if acting.cancelled():
            raise TideError("ended", "the task was ended while it acted")
        return acting.result()

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
            "messages": [script.message(turn + 1)],
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
        _drop_oldest(self.accounts)
        return self.accounts[task.task_id]


def _drop_oldest(remembered: dict[str, Any]) -> None:
    """Keep what is remembered of ended tasks bounded, so that a server may run for ever."""
    if len(remembered) > _MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
