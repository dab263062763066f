"""The reward functions of a `verifiers`-style rubric, called with the arguments that they name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_origin

from tide_sdk.errors import told

Run = Callable[..., Awaitable[Any]]
_OF_GROUPS = {"states", "prompts", "completions", "answers", "tasks", "infos"}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One reward function: its name among the metrics, its weight in the reward, and what its rubric hands it."""

    name: str
    function: Callable[..., Any]
    weight: float
    rubric: Any


def reward_functions(rubric: Any) -> list[RewardFunction]:
    """All functions of a rubric, those of the rubrics that it groups among them; none for None.

    Raises:
        ValueError: one scores whole groups of rollouts, or the weights do not fit.
    """
    if rubric is None:
        return []
    inner = getattr(rubric, "rubrics", None)
    if inner:
        return [one for each in inner for one in reward_functions(each)]
    functions = list(_first(rubric, "funcs", "reward_funcs") or ())
    weights = list(_first(rubric, "weights", "reward_weights") or [1.0] * len(functions))
    if len(weights) != len(functions):
        raise ValueError(f"the rubric has {len(functions)} functions and {len(weights)} weights")
    found: list[RewardFunction] = []
    for function, weight in zip(functions, weights, strict=True):
        name = str(getattr(function, "__name__", type(function).__name__))
        signature = inspect.signature(function)
        returns = signature.return_annotation
        if _OF_GROUPS & signature.parameters.keys() or returns is list or get_origin(returns) is list:
            raise ValueError(f"reward function {name} scores groups of rollouts; here each task is scored alone")
        found.append(RewardFunction(name, function, float(weight), rubric))
    return found


async def score(
    functions: Sequence[RewardFunction], state: Mapping[str, Any], parser: Any, run: Run
) -> tuple[float, dict[str, float]]:
    """The weighted sum of all functions, and what each gave.

    Args:
        functions: in their order; each sees what an earlier one left in the state.
        state: the rollout's.
        parser: the environment's, for a rubric that has none.
        run: `await run(function)` runs a plain function off the event loop.

    Raises:
        RuntimeError: a function raised, or gave no number: a reward that is not known is not 0.
    """
    total, scores = 0.0, dict[str, float]()
    for one in functions:
        try:
            given = await _call(one, _arguments(one, state, parser), run)
            number = float(given)
        except Exception as error:
            raise RuntimeError(f"reward function {one.name}: {told(error)}") from error
        total += one.weight * number
        scores[one.name] = number
    return total, scores


async def call_by_name(function: Callable[..., Any], arguments: Mapping[str, Any], run: Run) -> Any:
    """Call with those of the arguments that the function names, or with all where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        arguments = {name: value for name, value in arguments.items() if name in names}
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await run(lambda: function(**arguments))


async def _call(one: RewardFunction, arguments: Mapping[str, Any], run: Run) -> Any:
    return await call_by_name(one.function, arguments, run)


def _arguments(one: RewardFunction, state: Mapping[str, Any], parser: Any) -> dict[str, Any]:
    own_parser = getattr(one.rubric, "parser", None)
    arguments: dict[str, Any] = dict(cast("Mapping[str, Any]", state["input"]))
    arguments |= {name: state[name] for name in ("prompt", "completion", "answer", "info", "task")}
    arguments |= {"state": state, "parser": own_parser if own_parser is not None else parser}
    arguments |= getattr(one.rubric, "class_objects", None) or {}
    for provider in getattr(one.rubric, "score_object_providers", ()):
        arguments |= provider(state)
    return arguments


def _first(holder: Any, *names: str) -> Any:
    for name in names:
        value = getattr(holder, name, None)
        if value:
            return value
    return None
