"""The `@agent` decorator, and the default agent.

@agent
async def play(ctx: AgentContext) -> None:
    while not ctx.done:
        reply = await ctx.generate()
        await ctx.step(reply)

@agent(max_turns=20, sampling={"temperature": 0.7})
def play_too(ctx: BlockingContext) -> float:
    ...
"""

from __future__ import annotations

import importlib
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

if TYPE_CHECKING:
    from tide_sdk.blocking import BlockingContext
    from tide_sdk.context import AgentContext


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent may return.

    Attributes:
        reward: replaces the environment's reward; None keeps it. Any real number; here a bool counts as 1 or 0.
        metrics: plain JSON data for reports, 256 KiB at most; what is not is left out and named in the task's error.
    """

    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


Returned: TypeAlias = "AgentResult | float | None"
AgentFunction: TypeAlias = "Callable[[AgentContext], Awaitable[Returned]] | Callable[[BlockingContext], Returned]"


class AgentThreads:
    """Counts the threads of a plain agent in this process.

    Attributes:
        num_running: threads that are in the agent's function, abandoned ones included.
        num_abandoned: threads that did not return although their task was over.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.num_abandoned = 0
        self._lock = threading.Lock()

    def entered(self) -> None:
        """One more; called from any thread."""
        with self._lock:
            self.num_running += 1

    def left(self) -> None:
        """One less; called from any thread."""
        with self._lock:
            self.num_running -= 1


@dataclass(frozen=True, slots=True)
class Agent:
    """A named agent; call it with a context.

    Attributes:
        name: `module:function` unless the decorator gave another.
        function: the author's function; a plain one is run in a thread of its task.
        max_turns: the environment's turns after which it must stop, None for no limit; the task is then `truncated`.
        deadline_s: wall seconds for a task, pauses included; the smaller of this and the task's own counts.
        sampling: defaults of `ctx.generate`, over those of the endpoint.
        threads: those of a plain function.
    """

    name: str
    function: AgentFunction
    max_turns: int | None = None
    deadline_s: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    threads: AgentThreads = field(default_factory=AgentThreads, repr=False, compare=False)

    @property
    def blocking(self) -> bool:
        """True for a plain function."""
        return not _is_async(self.function)

    async def __call__(self, ctx: AgentContext) -> AgentResult:
        """Play one task. The runner applies the limits.

        Cancelling a plain function's play lets its next call of the context raise; see `BlockingContext`.

        Raises:
            TypeError: the function returned something else than None, a number, or an `AgentResult`.
        """
        from tide_sdk.blocking import play_in_thread
        from tide_sdk.outcomes import result_of

        function: Any = self.function
        if self.blocking:
            returned = await play_in_thread(self.name, function, ctx, self.threads)
        else:
            returned = await function(ctx)
        return result_of(self.name, returned)


@overload
def agent(function: AgentFunction, /) -> Agent: ...


@overload
def agent(
    *,
    max_turns: int | None = None,
    deadline_s: float | None = None,
    sampling: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[[AgentFunction], Agent]: ...


def agent(
    function: AgentFunction | None = None,
    /,
    *,
    max_turns: int | None = None,
    deadline_s: float | None = None,
    sampling: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Agent | Callable[[AgentFunction], Agent]:
    """Make a function of one context an agent: `@agent`, or `@agent(...)` with limits.

    Args:
        function: `async def` with an `AgentContext`, or `def` with a `BlockingContext`.
        max_turns: turns of the environment, at least 1; reaching it makes the task `truncated`, no error.
        deadline_s: wall seconds for a task, likewise.
        sampling: defaults of `ctx.generate`, for example `{"temperature": 0.7}`.
        name: what logs and errors call it.

    Raises:
        TypeError: it is no function of one argument.
        ValueError: a limit that is not above 0.
    """
    if max_turns is not None and (isinstance(max_turns, bool) or max_turns < 1):
        raise ValueError(f"@agent: max_turns is {max_turns}, it must be at least 1")
    if deadline_s is not None and not (math.isfinite(deadline_s) and deadline_s > 0):
        raise ValueError(f"@agent: deadline_s is {deadline_s}, it must be above 0 and finite")

    def make(function: AgentFunction) -> Agent:
        found: Any = function
        if isinstance(found, Agent) or not callable(found):
            raise TypeError(f"@agent wants a function, `async def` or `def`, not a {type(found).__name__}")
        if inspect.isasyncgenfunction(found) or inspect.isgeneratorfunction(found):
            raise TypeError("@agent wants a function that returns; this one yields")
        try:
            inspect.signature(found).bind(None)
        except (TypeError, ValueError) as error:
            raise TypeError(f"@agent wants a function of one argument, the context: {error}") from error
        given = name or f"{getattr(found, '__module__', '?')}:{getattr(found, '__qualname__', type(found).__name__)}"
        return Agent(given, function, max_turns, deadline_s, dict(sampling or {}))

    return make if function is None else make(function)


def load_agent(target: str) -> Agent:
    """The agent that `module:function` names.

    Raises:
        ValueError: there is none; the message says what is missing.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{target!r}: name the agent as module:function")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ValueError(f"cannot import the agent's module {module_name!r}: {error}") from error
    if not isinstance(found, Agent):
        raise ValueError(f"{target!r} is not a function with @tide_sdk.agent")
    return found


@agent
async def chat_agent(ctx: AgentContext) -> None:
    """Generate and step until the environment says that the task is over."""
    while not ctx.done:
        reply = await ctx.generate()
        await ctx.step(reply)


def _is_async(function: Any) -> bool:
    """True for `async def`, also of an object's `__call__`."""
    kind = cast("Any", type(function))
    call = getattr(kind, "__call__", None)  # noqa: B004 (its kind is asked, not whether it can be called)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
