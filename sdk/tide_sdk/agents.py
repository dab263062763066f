"""The `@agent` decorator, and the default agent.

@agent
async def play(ctx: AgentContext) -> None:
    while not ctx.done:
        reply = await ctx.generate()
        await ctx.step(reply)
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tide_sdk.context import AgentContext


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent may return.

    Attributes:
        reward: replaces the environment's reward; None keeps it.
        metrics: plain JSON data for reports.
    """

    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


AgentFunction: TypeAlias = Callable[[AgentContext], Awaitable["AgentResult | float | None"]]


@dataclass(frozen=True, slots=True)
class Agent:
    """A named agent; call it with a context.

    Attributes:
        name: `module:function`, which `load_agent` finds again.
        function: the author's function.
    """

    name: str
    function: AgentFunction

    async def __call__(self, ctx: AgentContext) -> AgentResult:
        """Play one task.

        Raises:
            TypeError: the function returned something else than None, a number, or an `AgentResult`.
        """
        result: Any = await self.function(ctx)
        if result is None:
            return AgentResult()
        if isinstance(result, AgentResult):
            return result
        if isinstance(result, (int, float)) and not isinstance(result, bool):
            return AgentResult(reward=float(result))
        raise TypeError(f"{self.name} returned a {type(result).__name__}: return None, a float or an AgentResult")


def agent(function: AgentFunction) -> Agent:
    """Make an async function of one `AgentContext` an agent.

    Raises:
        TypeError: it is not such a function.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError("@agent wants an `async def` function")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise TypeError(f"@agent wants a function of one argument, the context: {error}") from error
    return Agent(f"{function.__module__}:{function.__qualname__}", function)


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
