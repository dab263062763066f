"""An MCP server's tools as an environment, with the official package (the extra `mcp`).

    tide-env serve tide_sdk.mcp_environment:McpEnvironment --set command='["uvx","mcp-server-time"]'
    tide-env serve tide_sdk.mcp_environment:McpEnvironment --set url=http://127.0.0.1:8000/mcp

A task is `{"prompt": ..., "system": ..., "setup": {...}}` and whatever its scoring wants to know. A program is started
for each task and ends with it, so that no task sees another's state; at a URL each task has a session of its own.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_sdk.environment import EndInfo, Start, StartInfo, Step
from tide_sdk.errors import TideError
from tide_sdk.mcp_content import openai_names, reward_of, tool_result
from tide_sdk.mcp_session import McpAddress, McpProgram, McpSession
from tide_sdk.serve import import_here
from tide_sdk.tool_calls import ToolError, ToolResult, definition, unknown_tool
from tide_sdk.tools import ToolEnvironment
from tide_sdk.wire import MAX_PARTS, Message

Score = Callable[[dict[str, Any], list[dict[str, Any]]], "float | Awaitable[float | None] | None"]


class McpTask(BaseModel):
    """The task parameters; further ones are the scoring's.

    Attributes:
        prompt: the first user message, a text or OpenAI content parts.
        system: a system message before it, none if empty.
        setup: arguments of the `setup_tool`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str = ""
    setup: dict[str, Any] = {}


class McpEnvironment(ToolEnvironment):
    """Plays the tools of one MCP server; subclass it to override `score`, or to add tools of your own.

    The model ends a task with a message that calls no tool, with one of `final_tools`, or by `max_turns`. Then, or when
    the agent stops early, it is scored once. A tool's own errors are told to the model; a server that crashes fails
    the task. Pausing a task leaves its server as it is.

    Args:
        command: the program and its arguments as a list, or the program alone; no shell reads it.
        url: instead of `command`, a server that speaks streamable HTTP.
        variables: the server's process environment.
        inherit: names of variables that it gets from this process's environment.
        folder: its working directory.
        token_variable: the variable of this process that holds the bearer token for `url`.
        allowed: the server's tools that the model may call; None for all.
        setup_tool: a tool called at the start with the task's `setup`; not the model's.
        final_tools: a call of one of these ends the task.
        reward_tool: a tool called at the end, without arguments, whose answer holds the reward; not the model's.
        scoring: `module:function`, called with the task's parameters and all messages; gives the reward, or None.
        max_turns: messages after which a task is truncated.
        reminder: what a message without tool calls is answered; empty lets it end the task.
        start_limit_s: seconds for the server to be ready.
        call_limit_s: seconds for each answer; a tool that takes longer is told to the model as an error.
    """

    name: ClassVar[str] = "mcp"

    def __init__(
        self,
        *,
        command: str | Sequence[str] = "",
        url: str = "",
        variables: Mapping[str, str] | None = None,
        inherit: Sequence[str] = ("PATH",),
        folder: str | None = None,
        token_variable: str = "",
        allowed: Sequence[str] | None = None,
        setup_tool: str = "",
        final_tools: Sequence[str] = (),
        reward_tool: str = "",
        scoring: str = "",
        max_turns: int | None = None,
        reminder: str = "",
        start_limit_s: float = 60.0,
        call_limit_s: float = 60.0,
    ) -> None:
        if bool(command) is bool(url):
            raise ValueError("give either command or url")
        if scoring and reward_tool:
            raise ValueError("give scoring or reward_tool, not both")
        if command:
            environment = {name: os.environ[name] for name in inherit if name in os.environ}
            server = _program(command, {**environment, **(variables or {})}, folder)
        else:
            server = _address(url, token_variable)
        self.max_turns, self.reminder = max_turns, reminder
        self._session = McpSession(server, call_limit_s=call_limit_s)
        self._start_limit_s = start_limit_s
        self._allowed, self._final_tools = allowed, frozenset(final_tools)
        self._setup_tool, self._reward_tool = setup_tool, reward_tool
        self._scoring = load_function(scoring) if scoring else None
        self._names: dict[str, str] = {}
        self._task: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []
        self._scored = False
        self._acting = False

    async def start(self, task: StartInfo) -> Start:
        """Start or reach the server, and offer its tools.

        Raises:
            TideError: `invalid`, naming the task parameter.
            McpFailed: the server is not there.
        """
        try:
            asked = McpTask.model_validate(task.task)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(["task", *(str(part) for part in first["loc"][:1])])
            raise TideError("invalid", f"{field}: {first['msg']}", field=field) from error
        self._task = task.task
        listed = {one.name: one for one in await self._session.open(self._start_limit_s)}
        self._check_named(listed)
        hidden = {self._setup_tool, self._reward_tool}
        offered = [name for name in listed if name not in hidden and (self._allowed is None or name in self._allowed)]
        self._names = openai_names(offered)
        tools = [
            definition(shown, listed[name].description or "", listed[name].input_schema)
            for shown, name in self._names.items()
        ]
        tools = [dict(one) for one in self.tools if one["function"]["name"] not in self._names] + tools
        if self._setup_tool:
            answer = await self._session.call(self._setup_tool, asked.setup)
            if answer.is_error:
                raise TideError("invalid", f"task.setup: {tool_result(answer).content}", field="task.setup")
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        self._messages = [*system, {"role": "user", "content": asked.prompt}]
        return Start(list(self._messages), tools[:MAX_PARTS])

    async def step(self, message: Message) -> Step:
        """Run the calls of one message; score where that ended the task."""
        self._acting = True
        step = await super().step(message)
        told = [{"role": "user", "content": one} if isinstance(one, str) else one for one in _listed(step.messages)]
        self._messages += [message.as_dict(), *told]
        reward = await self._score_once() if step.terminated or step.truncated else None
        self._acting = False
        total = step.reward if reward is None else reward + (step.reward or 0.0)
        return Step(step.messages, total, step.terminated, step.truncated, step.info)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool of the server, or one of the class's own."""
        original = self._names.get(name)
        if original is None:
            if name in self._function_tools:
                return await super().call_tool(name, arguments)
            raise unknown_tool(name, [*self._function_tools, *self._names])
        result = tool_result(await self._session.call(original, arguments))
        if original not in self._final_tools or result.error:
            return result
        return ToolResult(result.content, result.images, terminated=True)

    async def score(self, task: dict[str, Any], messages: list[dict[str, Any]]) -> float | None:
        """The task's reward; by default what `reward_tool` or `scoring` says, None where there is neither.

        Args:
            task: the task's parameters.
            messages: everything said, the prompt first.
        """
        if self._reward_tool:
            return reward_of(await self._session.call(self._reward_tool, {}))
        if self._scoring is None:
            return None
        return await self._call(self._scoring, task, messages)

    async def end(self, reason: str | None) -> EndInfo:
        """Score a task that the agent left early, and stop the server for certain."""
        try:
            played = any(message["role"] == "assistant" for message in self._messages)
            if played and not self._scored and not self._acting and self._session.alive:
                return EndInfo(await self._score_once())
            return EndInfo()
        finally:
            await self._session.aclose()

    async def _score_once(self) -> float | None:
        self._scored = True
        try:
            return await self.score(self._task, list(self._messages))
        except ToolError as error:
            raise RuntimeError(f"the scoring tool: {error}") from error

    def _check_named(self, listed: Mapping[str, Any]) -> None:
        named = [self._setup_tool, self._reward_tool, *self._final_tools, *(self._allowed or ())]
        missing = sorted({name for name in named if name and name not in listed})
        if missing:
            raise ValueError(f"the MCP server has no tool {', '.join(missing)}; it has: {', '.join(listed)}")


def load_function(target: str) -> Score:
    """The function that `module:function` names; the working directory is searched too.

    Raises:
        ValueError: there is no such module or function.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise ValueError(f"scoring {target!r}: give it as module:function")
    try:
        found = getattr(import_here(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"scoring {target!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"scoring {target!r} is no function")
    return cast("Score", found)


def _program(command: str | Sequence[str], variables: Mapping[str, str], folder: str | None) -> McpProgram:
    words = [command] if isinstance(command, str) else [str(word) for word in command]
    if shutil.which(words[0], path=variables.get("PATH")) is None:
        raise ValueError(f"command: there is no program {words[0]!r}; give a list of the program and its arguments")
    wrong = [name for name, value in variables.items() if not name.isidentifier() or "\0" in value]
    if wrong:
        raise ValueError(f"variables: {', '.join(wrong)}: a name has letters, digits and _, a value no NUL")
    return McpProgram(words, dict(variables), folder)


def _address(url: str, token_variable: str) -> McpAddress:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url: {url!r} is no http:// or https:// address")
    if not token_variable:
        return McpAddress(url)
    token = os.environ.get(token_variable, "")
    if not token:
        raise ValueError(f"token_variable: {token_variable} is not set")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError("url: a token is sent over https:// or to this machine only")
    return McpAddress(url, token)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, Message, Mapping)):
        return (cast("Any", messages),)
    return list(messages)
