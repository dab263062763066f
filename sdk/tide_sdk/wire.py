"""The wire contract: what the gateway, environment servers and agents say to each other.

JSON over HTTP with the header `Tide-Contract: 1`. Every model is frozen and refuses unknown fields, so that a
misspelt field is an error that names it. `docs/contract.md` is the same contract in words.

Source: TideRL appendix B.1 (the five endpoints); rewards and endings follow gymnasium.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tide_sdk.clocks import ClockName, TaskState

CONTRACT_VERSION = 1
CONTRACT_HEADER = "Tide-Contract"
IMAGES_HEADER = "Tide-Images"
"""Of a call to a gateway: `reference` asks for observations whose images are references; any other value, or none, for
the images themselves."""
MAX_LIMIT_S = 30 * 24 * 3600.0
MAX_EPOCH = 2**63 - 1
MAX_KEY_CHARS = 512
MAX_HEARTBEAT_S = 24 * 3600.0
MAX_PARTS = 1024
"""Parts of a message's content, calls in a message, messages and tools in an answer, names in its metrics and info."""
PRINTABLE = r"^[^\x00-\x1f\x7f]*$"
"""What is stored or logged as a word holds no control characters: no NUL, which PostgreSQL refuses, and no new line."""

Seconds = Annotated[float, Field(strict=True, gt=0, le=MAX_LIMIT_S, allow_inf_nan=False)]
Epoch = Annotated[int, Field(strict=True, ge=1, le=MAX_EPOCH)]
TaskId = Annotated[str, Field(min_length=1, max_length=128, pattern=PRINTABLE)]
Parts = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)]
Named = Annotated[dict[str, Any], Field(max_length=MAX_PARTS)]
Limits = dict[ClockName, Seconds]


class Wire(BaseModel):
    """Base of all bodies: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Message(BaseModel):
    """An OpenAI chat message; parts, tool calls and further fields of the OpenAI schema pass through unchanged.

    Attributes:
        role: system, developer, user, assistant or tool.
        content: text, a list of text and image parts, or None beside tool calls.
        tool_calls: the calls of an assistant message, in the order in which they run.
        tool_call_id: the call that a tool message answers.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    tool_calls: Parts | None = None
    tool_call_id: str | None = Field(default=None, max_length=512)

    @property
    def text(self) -> str:
        """The words of the message: its content, or its text parts joined; empty if there are none."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content or () if part.get("type") == "text")

    def as_dict(self) -> dict[str, Any]:
        """The message as a plain dict, without the fields that are None."""
        return self.model_dump(exclude_none=True)


class Action(Message):
    """The message of an agent: an assistant's, whatever else it holds."""

    role: Literal["assistant"]  # pyright: ignore[reportIncompatibleVariableOverride] (frozen: nobody assigns to it)


MessageList = Annotated[list[Message], Field(max_length=MAX_PARTS)]


class Clock(Wire):
    """A clock as it stands: seconds used and left of its limit."""

    limit_s: float
    consumed_s: float
    remaining_s: float


Clocks = dict[ClockName, Clock]


class Outcome(Wire):
    """How a task ended. `failed` is the infrastructure's or environment's fault and carries no reward."""

    kind: Literal["completed", "truncated", "expired", "aborted", "failed"]
    clock: ClockName | None = None
    reason: str | None = None


class StartRequest(Wire):
    """`POST /start`.

    Attributes:
        environment: the environment's registered name.
        key: unique per owner, for example run/step/group/member; a repeated start with it is the same start.
        task: parameters for the environment, its own schema.
        seed: the episode's seed.
        split: the data split the task is drawn from, for example train or test.
        kind: train or eval.
        limits: clock limits in seconds that replace the environment's own.
        attempt: numbered upwards; a higher one ends the older attempt of the same key.
    """

    environment: str = Field(min_length=1, max_length=128, pattern=PRINTABLE)
    key: str = Field(min_length=1, max_length=MAX_KEY_CHARS, pattern=PRINTABLE)
    task: dict[str, Any] | None = None
    seed: int | None = Field(default=None, strict=True, ge=0, le=2**63 - 1)
    split: str | None = Field(default=None, max_length=64, pattern=PRINTABLE)
    kind: Literal["train", "eval"] = "train"
    limits: Limits | None = None
    attempt: int = Field(default=0, strict=True, ge=0, le=2**31 - 1)


class StartResponse(Wire):
    """The first observation; the first action is turn 0."""

    task_id: TaskId
    turn: int
    messages: MessageList
    tools: Parts
    limits: Limits
    clocks: Clocks


class ObservationRequest(Wire):
    """`POST /observation`: the action of turn `turn`, an assistant message."""

    task_id: TaskId
    turn: int = Field(strict=True, ge=0, le=2**31 - 1)
    message: Action


class ObservationResponse(Wire):
    """The environment's answer; `turn` is the number that the next action carries.

    Attributes:
        reward: this turn's reward, None where the environment gives none.
        terminated: the task reached an end of its own (gymnasium).
        truncated: the task was cut short, for example at its maximal turns (gymnasium).
        info: free data for people and metrics; never shown to the model.
    """

    turn: int
    messages: MessageList
    reward: float | None
    terminated: bool
    truncated: bool
    info: Named
    clocks: Clocks


class EpochRequest(Wire):
    """`POST /pause` and `POST /resume`; an epoch that is not newer changes nothing."""

    task_id: TaskId
    epoch: Epoch | None = None


class EpochResponse(Wire):
    """The state after a pause or resume."""

    state: TaskState
    epoch: int
    clocks: Clocks


class EndRequest(Wire):
    """`POST /end`."""

    task_id: TaskId
    reason: str | None = Field(default=None, max_length=1024, pattern=r"^[^\x00]*$")


def fitting_reason(text: str) -> str:
    """The text as `EndRequest.reason` takes it: cut, and without what it may not hold."""
    return text[:1024].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


class EndResponse(Wire):
    """The task's final account. `reward` is None after an infrastructure failure, never 0."""

    reward: float | None
    metrics: Named
    turns: int
    clocks: Clocks
    outcome: Outcome


class HealthResponse(Wire):
    """`GET /health` of an environment server.

    Attributes:
        contract: the contract version that the server speaks.
        environment: the name of what it serves.
        capacity: tasks that it can hold at once.
        tasks: tasks that it holds now.
        incarnation: random at each process start; a changed one means that all tasks of the older one are gone.
    """

    contract: int
    environment: str = Field(max_length=128)
    capacity: int = Field(le=2**31 - 1)
    tasks: int = Field(ge=0, le=2**31 - 1)
    incarnation: str = Field(min_length=1, max_length=128, pattern=PRINTABLE)


class TaskView(Wire):
    """One task in `GET /tasks` and `GET /tasks/{id}`."""

    task_id: TaskId
    environment: str
    key: str
    attempt: int
    kind: Literal["train", "eval"]
    state: TaskState
    turn: int
    epoch: int
    reward: float | None
    outcome: Outcome | None
    clocks: Clocks
    created_at: str


class HeartbeatRequest(Wire):
    """`POST /heartbeat` of a gateway: the owner's promise to call again in time, one for each prefix.

    Attributes:
        prefix: the promise is for the tasks whose key begins with it; "" for all of the owner's tasks.
        timeout_s: the next heartbeat comes within so many seconds, or those tasks end; None withdraws the promise.
    """

    prefix: str = Field(default="", max_length=MAX_KEY_CHARS, pattern=PRINTABLE)
    timeout_s: Annotated[float, Field(gt=0, le=MAX_HEARTBEAT_S, allow_inf_nan=False)] | None


class HeartbeatResponse(Wire):
    """The promise as it stands now.

    Attributes:
        owner_tasks: the owner's open tasks whose key begins with the prefix.
        timeout_s: as it was asked for.
    """

    owner_tasks: int
    timeout_s: float | None


class CapacityView(Wire):
    """One environment in `GET /capacity` of a gateway.

    Attributes:
        capacity: slots, of all owners together.
        taken: slots held now, those of starting and ending tasks included.
        free: tasks of kind train that the caller could start now, its own waiting starts among them.
        free_eval: the same for kind eval.
        mine: slots that the caller holds.
        waiting: starts that have a place in the queue.
        starts_per_s: the start rate, which `free` leaves aside; 0 where there is none.
    """

    capacity: int
    taken: int
    free: int
    free_eval: int
    mine: int
    waiting: int
    starts_per_s: float


class Problem(BaseModel):
    """An error body, RFC 9457 problem+json. `code` is stable; `detail` names the field and the fix."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
