"""What an environment's author writes: a class with `start` and `step`.

    class Guess(Environment):
        name = "guess"
        blocking = False

        def start(self, task: StartInfo) -> Start:
            self.secret = random.Random(task.seed).randint(1, 9)
            return Start("I think of a number from 1 to 9.")

        def step(self, message: Message) -> Step:
            hit = str(self.secret) in message.text
            return Step("Right." if hit else "No.", reward=float(hit), terminated=hit)

Serve it with `tide-env serve module:Guess`. One instance of the class is made for each task.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from tide_sdk.wire import Message

AnyMessage: TypeAlias = "str | Message | Mapping[str, Any]"
"""A user message as a string, or any OpenAI chat message."""
Messages: TypeAlias = "AnyMessage | Sequence[AnyMessage]"


@dataclass(frozen=True, slots=True)
class StartInfo:
    """What a task asks of the environment.

    Attributes:
        task: the environment's own parameters; {} if none were given.
        seed: the episode's seed, None if the caller does not care.
        split: the data split, for example train or test.
        kind: train or eval.
    """

    task: dict[str, Any]
    seed: int | None = None
    split: str | None = None
    kind: Literal["train", "eval"] = "train"


@dataclass(frozen=True, slots=True)
class Start:
    """The first observation.

    Attributes:
        messages: what the model sees first; a string is a user message.
        tools: OpenAI tool definitions of this task; None takes the class's `tools`.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to one model message.

    Attributes:
        messages: what the model sees next; a string is a user message. May be empty at the end.
        reward: this turn's reward, None where there is none.
        terminated: the task reached an end of its own.
        truncated: the task was cut short, for example at its maximal turns.
        info: plain JSON data for people and metrics; never shown to the model.
    """

    messages: Messages = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class EndInfo:
    """The final account of a task.

    Attributes:
        reward: the final score, which replaces the sum of the turns' rewards; None keeps the sum.
        metrics: plain JSON data for reports.
    """

    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


async def _run_here(function: Callable[..., Any], *args: Any) -> Any:
    result = function(*args)
    return await result if inspect.isawaitable(result) else result


class Environment:
    """Base class of environments; override `start` and `step`, and the rest where needed.

    Each method may be `async def` or `def`. A plain method runs in a thread of its instance, always the same one, so
    it may block; with `blocking = False` it runs on the event loop, which is much cheaper for pure, quick code.
    The calls of one instance never overlap. `__init__` takes the options of `tide-env serve --set`.

    An exception in `start` fails the start, and a later start with the same key tries anew; raise
    `TideError("invalid", ..., field=...)` there for bad task parameters. An exception in `step` or `end` fails the task
    for good (`environment_failed`, no reward), because nobody knows what state it left: answer a bad action with a
    `Step` that says so.

    Attributes:
        name: what the environment is called; the class's name if empty.
        capacity: tasks that one server process holds at once.
        tools: OpenAI tool definitions, unless `Start` gives others.
        blocking: False promises that plain methods return within a millisecond or so.
    """

    name: ClassVar[str] = ""
    capacity: ClassVar[int] = 64
    tools: ClassVar[Sequence[Mapping[str, Any]]] = ()
    blocking: ClassVar[bool] = True

    in_thread: Callable[..., Awaitable[Any]] = staticmethod(_run_here)
    """`await self.in_thread(function, *args)` in an async method: run a plain function where this instance's plain
    methods run, its own thread as a rule. Made by the server; without one the function runs at once."""

    def start(self, task: StartInfo) -> Start | Awaitable[Start]:
        """Begin the task and give the first observation."""
        raise NotImplementedError(f"{type(self).__name__} must define start(self, task)")

    def step(self, message: Message) -> Step | Awaitable[Step]:
        """Act on one assistant message; called exactly once for each turn."""
        raise NotImplementedError(f"{type(self).__name__} must define step(self, message)")

    def end(self, reason: str | None) -> EndInfo | Awaitable[EndInfo | None] | None:
        """Release what the task holds; called once, also after a failure or an expired clock.

        Args:
            reason: None when the task came to its own end, else why it was cut off.
        """

    def pause(self) -> Awaitable[None] | None:
        """Stop timers of your own until `resume`; no step runs meanwhile."""

    def resume(self) -> Awaitable[None] | None:
        """Let timers of your own go on."""
