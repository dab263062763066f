"""Single-file environments in the style of `verifiers`: a module whose `load_environment` gives dataset and rubric.

    Gsm = wrap_verifiers("my_module", difficulty="hard")

Serve it with `tide-env serve module:Gsm`. The object is wrapped by what it has, so that the package is not needed: a
dataset, a rubric, and `env_response` where it takes several turns. The module is loaded once, and its object is shared
by all tasks, as its package does; what belongs to a task is in its state.
"""

from __future__ import annotations

import inspect
import random
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from tide_sdk.environment import EndInfo, Environment, Start, StartInfo, Step
from tide_sdk.errors import TideError
from tide_sdk.serve import import_here
from tide_sdk.tool_calls import ToolLimits, ToolResult, as_result, definition, run_calls, unknown_tool
from tide_sdk.tools import FunctionTool
from tide_sdk.wire import Message
from tide_sdk.wrappers.plain import plain
from tide_sdk.wrappers.verifiers_scoring import RewardFunction, call_by_name, reward_functions, score
from tide_sdk.wrappers.verifiers_state import Said, add_turn, new_state, openai_messages, prompt_of, said

EVAL_SPLITS = ("eval", "test", "validation")


class VerifiersEnvironment(Environment):
    """One rollout of a wrapped object; `wrap_verifiers` makes subclasses.

    The task is `{"index": row}`, or a row itself (`prompt` or `question`, `answer`, `info`); without either the seed
    chooses the row. Kind or split `eval` takes the evaluation dataset where there is one. The reward is the rubric's
    weighted sum, given with the last turn, or at the end where the agent stops early; metrics hold each function's
    score. A reward function that raises fails the task, since a reward that is not known is not 0.

    A stop condition that holds after the environment's answer ends the task at once, without another model turn.
    """

    loaded: ClassVar[Any]
    functions: ClassVar[Sequence[RewardFunction]] = ()

    _state: Said = Said()
    _acting: bool = False
    _scored: bool = False
    _metrics: Mapping[str, float] = {}

    async def start(self, task: StartInfo) -> Start:
        """Choose the row and set the state up.

        Raises:
            TideError: `invalid`, naming the task parameter.
        """
        env = self.loaded
        row = await self.in_thread(_row, env, task)
        prompt = prompt_of(row, getattr(env, "system_prompt", None), getattr(env, "few_shot", None))
        self._tools = _function_tools(env)
        self._state = new_state(row, prompt)
        tools = _definitions(env, self._state["info"], self._tools)
        self._state |= {"tool_defs": tools, "oai_tools": tools}
        setup = getattr(env, "setup_state", None)
        if setup is not None:
            self._state = await self._own(setup, self._state) or self._state
        return Start(openai_messages(self._state["prompt"]), tools)

    async def step(self, message: Message) -> Step:
        """Take one model message: the environment's answer, or the end and the reward."""
        self._acting = True
        state = self._state
        add_turn(state, message)
        answer: list[dict[str, Any]] = []
        over = await self._completed()
        if not over:
            answer = await self._respond(message)
            over = state.get("final_env_response") is not None or await self._completed()
        reward = await self._score() if over else None
        self._acting = False
        limit = getattr(self.loaded, "max_turns", None) or 1
        cut = 1 < limit <= state["turn"] and state.get("stop_condition") in (None, "max_turns_reached")
        return Step(answer, reward, terminated=over and not cut, truncated=over and cut)

    async def end(self, reason: str | None) -> EndInfo:
        """Score what the agent left early, and let the object clean up."""
        reward = None
        try:
            if self._state and self._state["turn"] and not self._scored and not self._acting:
                reward = await self._score()
            return EndInfo(reward, dict(self._metrics))
        finally:
            for owner in (self.loaded, getattr(self.loaded, "rubric", None)):
                clean = getattr(owner, "cleanup", None)
                if self._state and callable(clean):
                    await self._own(clean, self._state)

    async def _respond(self, message: Message) -> list[dict[str, Any]]:
        env, state = self.loaded, self._state
        if hasattr(env, "env_response"):
            answer = await self._own(env.env_response, [*state["prompt"], *state["completion"]], state)
            if isinstance(answer, tuple):  # older files give the state too
                answer, self._state = cast("tuple[Any, Said]", answer)
                state = self._state
            final = state.get("final_env_response")
            messages = openai_messages(final if final is not None else answer)
        else:
            messages = cast(
                "list[dict[str, Any]]", (await run_calls(message.tool_calls or (), self._call, ToolLimits())).messages
            )
        state["completion"] += [said(one) for one in messages]
        return messages

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        found = self._tools.get(name)
        if found is None:
            raise unknown_tool(name, list(self._tools))
        return as_result(await call_by_name(found.function, found.read(arguments), self.in_thread))

    async def _completed(self) -> bool:
        env, state = self.loaded, self._state
        check = getattr(env, "is_completed", None)
        if check is not None:
            messages = [*state["prompt"], *state["completion"]]
            takes = inspect.signature(check).parameters
            return bool(await self._own(check, *((messages, state) if "messages" in takes else (state,))))
        if not hasattr(env, "env_response"):
            asked = getattr(state["trajectory"][-1]["completion"][-1], "tool_calls", None)
            if not self._tools or not asked:
                return True
        limit = getattr(env, "max_turns", None)
        return limit is not None and 0 < limit <= state["turn"]

    async def _score(self) -> float:
        self._scored = True
        state = self._state
        reward, self._metrics = await score(self.functions, state, getattr(self.loaded, "parser", None), self.in_thread)
        state["reward"], state["metrics"] = reward, dict(self._metrics)
        return reward

    async def _own(self, function: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await self.in_thread(function, *args)


def wrap_verifiers(
    module: str | Callable[..., Any], *, name: str = "", capacity: int = 64, blocking: bool = True, **arguments: Any
) -> type[VerifiersEnvironment]:
    """A class that serves a single-file environment in the style of `verifiers`.

    Call it where a module is imported, in the main thread: loading may need that.

    Args:
        module: the module's name, or its `load_environment`.
        name: of the environment; the module's if empty.
        capacity: tasks that one server holds at once.
        blocking: True runs the file's plain functions in a thread of each task; False on the event loop, as their own
            package does, for code that must stay in the main thread.
        arguments: for `load_environment`.

    Raises:
        ValueError: the module has no `load_environment`, or what it gives cannot be served.
    """
    if isinstance(module, str):
        shown = module
        load = getattr(import_here(module.rpartition("/")[2].replace("-", "_")), "load_environment", None)
        if load is None:
            raise ValueError(f"module {module!r} has no function load_environment")
    else:
        shown, load = str(module.__module__), module
    with _signals_kept():
        loaded = load(**arguments)
    if not any(hasattr(loaded, member) for member in ("dataset", "get_dataset", "eval_dataset")):
        raise ValueError(f"{shown}: load_environment gave a {type(loaded).__name__}, which has no dataset")
    title = name or shown.rpartition(".")[2]
    attributes: dict[str, Any] = {
        "name": title,
        "capacity": capacity,
        "blocking": blocking,
        "loaded": loaded,
        "functions": reward_functions(getattr(loaded, "rubric", None)),
        "__doc__": f"The verifiers-style environment {shown}.",
    }
    words = "".join(part.capitalize() for part in title.replace("-", "_").split("_"))
    return type(words or "Wrapped", (VerifiersEnvironment,), attributes)


@contextmanager
def _signals_kept() -> Generator[None]:
    # Objects of the package take SIGINT and SIGTERM for themselves; here they are the server's.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _row(env: Any, task: StartInfo) -> dict[str, Any]:
    given = task.task
    if "prompt" in given or "question" in given:
        return dict(given)
    unknown = sorted(given.keys() - {"index"})
    if unknown:
        raise TideError("invalid", f"task.{unknown[0]}: give `index`, or a row", field=f"task.{unknown[0]}")
    dataset = _dataset(env, evaluation=task.kind == "eval" or task.split in EVAL_SPLITS)
    size, index = len(dataset), given.get("index")
    if index is None:
        index = random.randrange(size) if task.seed is None else task.seed % size  # noqa: S311 (no secret)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
        raise TideError("invalid", f"task.index: a whole number from 0 to {size - 1}", field="task.index")
    return dict(dataset[index])


def _dataset(env: Any, *, evaluation: bool) -> Any:
    for kind in ("eval_dataset", "dataset") if evaluation else ("dataset", "eval_dataset"):
        if getattr(env, kind, None) is None and getattr(env, f"{kind}_source", None) is None:
            continue
        found = getattr(env, f"get_{kind}")() if hasattr(env, f"get_{kind}") else getattr(env, kind)
        if found is not None and len(found):
            return found
    raise ValueError("the environment's dataset is empty")


def _function_tools(env: Any) -> dict[str, FunctionTool]:
    """Tools of an object that does not answer calls itself."""
    if hasattr(env, "env_response"):
        return {}
    made = [FunctionTool(function) for function in getattr(env, "tools", None) or ()]
    return {one.name: one for one in made}


def _definitions(env: Any, info: Mapping[str, Any], own: Mapping[str, FunctionTool]) -> list[dict[str, Any]]:
    given: Any = None
    for holder, key in ((info, "tool_defs"), (info, "oai_tools")):
        given = given or holder.get(key)
    given = given or getattr(env, "tool_defs", None) or getattr(env, "oai_tools", None)
    if not given:
        return [one.definition for one in own.values()]
    return [_definition(one) for one in given]


def _definition(given: Any) -> dict[str, Any]:
    plain_one = cast("dict[str, Any]", given.model_dump(exclude_none=True) if hasattr(given, "model_dump") else given)
    if "function" in plain_one:
        return cast("dict[str, Any]", plain(plain_one))
    return definition(plain_one["name"], plain_one.get("description", ""), plain(plain_one["parameters"]))
