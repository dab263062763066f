"""One running environment: calls the author's code in the right place and names it in every failure."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, cast

from pydantic import ValidationError

from tide_sdk import codec
from tide_sdk.environment import EndInfo, Environment, Start, StartInfo, Step
from tide_sdk.errors import TideError, told
from tide_sdk.instance_thread import InstanceThread
from tide_sdk.timers import within
from tide_sdk.wire import Message

_log = logging.getLogger("tide_sdk.environment")
HOOK_LIMIT_S = 30.0
"""Seconds that an author's `pause` or `resume` may take."""


class Instance:
    """One instance of the author's class.

    Args:
        environment: the author's class.
        options: keyword arguments of its `__init__`.
    """

    def __init__(self, environment: type[Environment], options: Mapping[str, Any]) -> None:
        self._class = environment
        self._options = options
        self._environment: Environment | None = None
        self._lock = asyncio.Lock()
        self._thread: InstanceThread | None = None
        step = environment.step
        self._inline_step = not environment.blocking and not inspect.iscoroutinefunction(step)
        self._ends_in_thread = environment.blocking and not inspect.iscoroutinefunction(environment.end)

    @property
    def inline(self) -> bool:
        """True if a `step` now runs to its end without giving up the event loop."""
        return self._inline_step and not self._lock.locked()

    async def start(self, info: StartInfo) -> tuple[bytes, bytes]:
        """Make the instance and begin the task: the first messages and the tools, as JSON.

        Raises:
            TideError: what the author raised as one, else `environment_failed`.
        """
        try:
            await self._run(self._make)
        except Exception as error:
            raise self._failed("__init__", error) from error
        start = await self._author("start", Start, info)
        messages = self._messages("start", start.messages)
        try:
            tools = [dict(tool) for tool in (self._class.tools if start.tools is None else start.tools)]
            return codec.dumps(messages), codec.dumps(tools)
        except Exception as error:  # the author's own mappings may raise anything
            raise self._failed("start", error, "its Start cannot be sent") from error

    async def step(self, message: Message) -> tuple[bytes, Step]:
        """Act once: the observation's fields as a JSON object, and the author's answer.

        Raises:
            TideError: `environment_failed`; the task is over.
        """
        step = await self._author("step", Step, message)
        try:
            reward = None if step.reward is None else self._finite("step", step.reward)
            body = codec.dumps(
                {
                    "messages": self._messages("step", step.messages),
                    "reward": reward,
                    "terminated": bool(step.terminated),
                    "truncated": bool(step.truncated),
                    "info": dict(step.info),
                }
            )
        except TideError:
            raise
        except Exception as error:  # the author's own mappings, numbers and flags may raise anything
            raise self._failed("step", error, "its Step cannot be sent") from error
        return body, Step((), reward, bool(step.terminated), bool(step.truncated))

    async def end(self, reason: str | None) -> EndInfo:
        """Release the instance; a task whose start failed has nothing to release.

        Raises:
            TideError: `environment_failed`.
        """
        try:
            if self._environment is None and self._thread is None:
                return EndInfo()
            info = await self._author("end", EndInfo | None, reason) or EndInfo()
            reward = None if info.reward is None else self._finite("end", info.reward)
            try:
                # Read back: the account is told later, and the author's code may change its own by then.
                metrics = codec.loads(codec.dumps(dict(info.metrics)))
            except Exception as error:
                raise self._failed("end", error, "its EndInfo cannot be sent") from error
            return EndInfo(reward, metrics)
        finally:
            if self._thread is not None:
                self._thread.stop()
                self._thread = None
            if not self._ends_in_thread:
                # The task's answers are remembered for long; what the author's object holds must not be.
                self._environment = None

    async def pause(self) -> None:
        """Tell the author's code, where it wants to know, that no clock runs."""
        if self._environment is not None and self._class.pause is not Environment.pause:
            await self._author("pause", None)

    async def resume(self) -> None:
        """Tell the author's code, where it wants to know, that the clocks run again."""
        if self._environment is not None and self._class.resume is not Environment.resume:
            await self._author("resume", None)

    def _make(self) -> None:
        environment = self._class(**self._options)
        environment.in_thread = self._run
        self._environment = environment

    def _end(self, reason: str | None) -> Any:
        environment, self._environment = self._environment, None
        return None if environment is None else environment.end(reason)

    async def _author(self, method: str, kind: Any, *args: Any) -> Any:
        async with self._lock:
            try:
                if method == "end":
                    result = await self._run_end(*args)
                else:
                    result = await self._run(getattr(self._environment, method), *args)
            except TideError as error:
                if method == "start":
                    raise
                raise self._failed(method, error) from error
            except Exception as error:
                raise self._failed(method, error) from error
        if kind is not None and not isinstance(result, kind):
            error = TypeError(f"expected {getattr(kind, '__name__', kind)}, got {type(result).__name__}")
            raise self._failed(method, error, "it returned something else")
        return result

    async def _run_end(self, reason: str | None) -> Any:
        if self._ends_in_thread:
            # For certain: a method that returned too late, when nobody waits any more, is still followed by the end.
            return await self._run(self._end, reason, certain=True)
        if self._environment is None and self._thread is not None:
            await self._thread.call(lambda: None)  # `__init__` is still running there
        return None if self._environment is None else await self._run(self._environment.end, reason)

    async def _run(self, function: Callable[..., Any], *args: Any, certain: bool = False) -> Any:
        try:
            if self._class.blocking and not inspect.iscoroutinefunction(function):
                if self._thread is None:
                    self._thread = InstanceThread(f"tide-{self._class.__name__}")
                result = await self._thread.call(function, *args, certain=certain)
            else:
                result = function(*args)
            return await result if inspect.isawaitable(result) else result
        except (Exception, GeneratorExit):
            raise
        except BaseException as error:
            # An exit, a panic of a native library, or a cancellation that is the author's own: it fails this task and
            # neither ends the server nor is taken for a cancellation of ours.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise RuntimeError(told(error)) from error

    def _messages(self, method: str, messages: Any) -> list[dict[str, Any]]:
        several = isinstance(messages, (list, tuple)) or not isinstance(messages, (str, Message, Mapping))
        items = cast("Iterable[Any]", messages if several else (messages,))
        try:
            return [_as_dict(item) for item in items]
        except ValidationError as error:
            words = ValueError(error.errors()[0]["msg"])
            raise self._failed(method, words, "a message is not an OpenAI chat message") from error
        except Exception as error:  # a generator of the author's may raise anything
            raise self._failed(method, error, "a message is not an OpenAI chat message") from error

    def _finite(self, method: str, reward: Any) -> float:
        try:
            number = float(reward)
        except Exception as error:  # numbers of other libraries may raise anything
            raise self._failed(method, error, "a reward must be a number") from error
        if not math.isfinite(number):
            raise self._failed(method, ValueError(f"reward is {number}"), "a reward must be finite")
        return number

    def _failed(self, method: str, error: BaseException, what: str = "it raised") -> TideError:
        where = f"{self._class.__name__}.{method}"
        _log.error("%s: %s", where, what, exc_info=error)
        return TideError("environment_failed", f"{where}: {what}: {told(error)}", method=where)


def _as_dict(message: Any) -> dict[str, Any]:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if isinstance(message, Message):
        return message.as_dict()
    plain = dict(cast("Mapping[str, Any]", message))
    Message.model_validate(plain)
    return plain


async def run_hook(
    hook: Callable[[], Coroutine[Any, Any, None]], *, after: asyncio.Task[None] | None = None, quiet: bool = False
) -> None:
    """Call an author's `pause` or `resume`, after an earlier one; `quiet` where nobody waits for its failure.

    Raises:
        TideError: it failed, or took longer than `HOOK_LIMIT_S`.
    """
    if after is not None:
        await asyncio.wait((after,))
    try:
        await within(HOOK_LIMIT_S, hook())
    except (TimeoutError, TideError) as error:
        if not quiet:  # at the end of a turn nobody waits; the instance has logged it
            detail = error.detail if isinstance(error, TideError) else f"no answer within {HOOK_LIMIT_S} s"
            raise TideError("environment_failed", detail) from error
