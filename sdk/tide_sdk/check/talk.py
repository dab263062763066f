"""The conversation of one check with the server: calls, what is expected of their answers, and a log of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from tide_sdk import codec
from tide_sdk.check.answers import Answer, excerpt, expect, parse
from tide_sdk.check.case import Failed, Plan, Skipped
from tide_sdk.http_connection import TransportError
from tide_sdk.http_parse import Response
from tide_sdk.wire import EndResponse, EpochResponse, HealthResponse, ObservationResponse, StartResponse

if TYPE_CHECKING:
    from tide_sdk.check.subject import Subject

_KEPT = 4


@dataclass(slots=True)
class Task:
    """A task that a check started.

    Attributes:
        key: the key of its start.
        started: the answer of its start.
        turn: the turn that the next action carries.
        done: True once the environment has ended it.
        observations: the answers to its actions so far.
    """

    key: str
    started: dict[str, Any]
    turn: int = 0
    done: bool = False
    observations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def task_id(self) -> str:
        """The id that the server gave it."""
        return cast("str", self.started["task_id"])


class Talk:
    """What a check says to the server.

    Args:
        subject: the server.
        plan: how its environment is driven.
        prefix: of the keys of this check's starts, its own.
    """

    def __init__(self, subject: Subject, plan: Plan, prefix: str) -> None:
        self.subject = subject
        self.plan = plan
        self.notes: list[str] = []
        self._prefix = prefix
        self._num_keys = 0
        self._log: deque[str] = deque(maxlen=_KEPT)
        self._open: dict[str, None] = {}

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The last requests and answers."""
        return tuple(self._log)

    # calls

    async def send(
        self,
        method: str,
        path: str,
        payload: Any = None,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Make a call with a JSON payload, or with the bytes of `body`.

        Raises:
            Failed: no answer, or one that is not HTTP.
        """
        sent = codec.dumps(payload) if body is None and payload is not None else body
        try:
            response = await self.subject.client.request(
                method, path, sent, headers=headers, timeout_s=self.plan.timeout_s, idempotent=True
            )
        except TransportError as error:
            self._log.append(f"{_told(method, path, sent)}\n  no answer: {error}")
            raise Failed(f"{method} {path} got no answer: {error}") from error
        return self.heard(method, path, sent, response)

    def heard(self, method: str, path: str, sent: bytes | None, response: Response) -> Answer:
        """Log an answer and parse its body."""
        try:
            data = codec.loads(response.body)
        except codec.CodecError:
            data = None
        kind = response.headers.get("content-type", "no content type")
        words = excerpt(response.body)
        self._log.append(f"{_told(method, path, sent)}\n  {response.status} {kind}\n  {words}")
        answer = Answer(f"{method} {path.partition('?')[0]}", response, data)
        if path == "/start" and response.status < 300 and isinstance(answer.fields.get("task_id"), str):
            self._open[answer.fields["task_id"]] = None  # also where no start was expected
        return answer

    async def post(self, path: str, **fields: Any) -> Answer:
        """`POST` a JSON body."""
        return await self.send("POST", path, fields)

    async def get(self, task_id: str) -> Answer:
        """`GET /observation`."""
        return await self.send("GET", f"/observation?task_id={task_id}")

    async def health(self) -> HealthResponse:
        """`GET /health`, as the contract says it."""
        return parse(HealthResponse, expect(await self.send("GET", "/health"), 200))

    # tasks

    def start_body(self, **fields: Any) -> dict[str, Any]:
        """A start as the plan has it, with a key of its own."""
        self._num_keys += 1
        plan = self.plan
        name = self.subject.environment if plan.environment is None else plan.environment
        known = {"environment": name, "key": f"{self._prefix}/{self._num_keys}", "seed": 1}
        known |= {} if plan.task is None else {"task": plan.task}
        known |= {} if plan.split is None else {"split": plan.split}
        return known | fields

    async def start(self, **fields: Any) -> Task:
        """Start a task; it is ended after the check.

        Raises:
            Failed: it was not started as the contract says.
        """
        body = self.start_body(**fields)
        return self.begun(body, await self.send("POST", "/start", body))

    def begun(self, body: Mapping[str, Any], answer: Answer) -> Task:
        """The task that an answer of `/start` began."""
        parse(StartResponse, expect(answer, 201))
        return Task(str(body["key"]), answer.data)

    def action_of(self, task: Task, action: Mapping[str, Any] | str | None = None) -> dict[str, Any]:
        """The body of the task's next `/observation`."""
        message = self.plan.action(action) if action is None or isinstance(action, str) else dict(action)
        return {"task_id": task.task_id, "turn": task.turn, "message": message}

    async def act(self, task: Task, action: Mapping[str, Any] | str | None = None) -> dict[str, Any]:
        """Take the next turn: the usual action, the same with other words, or any other.

        Raises:
            Failed: it was not answered as the contract says.
            Skipped: the task is done, so that there is no next turn.
        """
        if task.done:
            raise Skipped("the actions ended the task too early; name one that does not with --action")
        return self.took(task, await self.send("POST", "/observation", self.action_of(task, action)))

    def took(self, task: Task, answer: Answer) -> dict[str, Any]:
        """Note the answer to the task's next turn."""
        observed = parse(ObservationResponse, expect(answer, 200))
        if observed.turn != task.turn + 1:
            raise Failed(f"turn {task.turn} was answered with turn {observed.turn}; the next turn is {task.turn + 1}")
        task.turn, task.done = observed.turn, observed.terminated or observed.truncated
        task.observations.append(answer.data)
        return cast("dict[str, Any]", answer.data)

    async def pause(self, task: Task, epoch: int | None = None) -> EpochResponse:
        """`POST /pause`."""
        return await self._pause("/pause", task, epoch)

    async def resume(self, task: Task, epoch: int | None = None) -> EpochResponse:
        """`POST /resume`."""
        return await self._pause("/resume", task, epoch)

    async def _pause(self, path: str, task: Task, epoch: int | None) -> EpochResponse:
        body = {"task_id": task.task_id} | ({} if epoch is None else {"epoch": epoch})
        return parse(EpochResponse, expect(await self.send("POST", path, body), 200))

    async def end(self, task: Task, reason: str | None = None) -> dict[str, Any]:
        """`POST /end`: the account."""
        body = {"task_id": task.task_id} | ({} if reason is None else {"reason": reason})
        answer = expect(await self.send("POST", "/end", body), 200)
        parse(EndResponse, answer)
        self._open.pop(task.task_id, None)
        return cast("dict[str, Any]", answer.data)

    async def clean_up(self) -> None:
        """End what the check left open.

        Raises:
            Failed: a task could not be ended; it would take places from the next checks.
        """
        for task_id in list(self._open):
            answer = await self.send("POST", "/end", {"task_id": task_id, "reason": "the check is over"})
            if answer.status != 404:
                expect(answer, 200)
            del self._open[task_id]

    def forget_tasks(self) -> None:
        """Note that the server died, and all tasks with it."""
        self._open.clear()


def _told(method: str, path: str, sent: bytes | None) -> str:
    return f"{method} {path}" + ("" if sent is None else f"\n  {excerpt(sent)}")
