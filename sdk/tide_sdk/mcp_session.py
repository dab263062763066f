"""One connection to an MCP server, which an asyncio task of its own opens, keeps and closes.

The task is its own because the protocol's client must be left where it was entered, while a task's start, steps and end
come from different ones. `aclose` asks it to leave. It stops the server's process with all that belongs to it, also
when nobody waits for that any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tide_sdk.errors import told
from tide_sdk.tool_calls import ToolError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

_log = logging.getLogger("tide_sdk.mcp")
MAX_PAGES = 100
MAX_TOOLS = 1024
CLOSE_LIMIT_S = 15.0
"""Seconds for a server to go: the client asks, waits, terminates and kills within about 8."""
PROBE_LIMIT_S = 5.0
T = TypeVar("T")


class McpFailed(Exception):
    """The MCP server did not start, or its connection is gone; names the server and what it said."""


@dataclass(frozen=True, slots=True)
class McpProgram:
    """A server that is started for one task and speaks on its standard input and output.

    Attributes:
        command: the program and its arguments; no shell reads them.
        variables: its whole process environment.
        folder: its working directory; None for this process's own.
    """

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: str | None = None

    def __str__(self) -> str:
        return repr(self.command[0])


@dataclass(frozen=True, slots=True)
class McpAddress:
    """A server at a URL (streamable HTTP); `token` is sent as a bearer token."""

    url: str
    token: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.url


class McpSession:
    """One session with a server.

    Args:
        server: the program to start, or the address.
        call_limit_s: seconds for each answer.
    """

    def __init__(self, server: McpProgram | McpAddress, *, call_limit_s: float) -> None:
        self._server = server
        self._call_limit_s = call_limit_s
        self._owner: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._opened = asyncio.Event()
        self._leave = asyncio.Event()

    async def open(self, limit_s: float) -> list[Tool]:
        """Connect, and list the server's tools.

        Raises:
            McpFailed: not within `limit_s` seconds, or it failed; `aclose` afterwards in any case.
        """
        from mcp import MCPError

        self._owner = asyncio.create_task(self._own())
        try:
            async with asyncio.timeout(limit_s):
                await self._or_gone(self._opened.wait())
                return await self._or_gone(self._list_tools())
        except TimeoutError as error:
            raise McpFailed(f"MCP server {self._server}: not ready within {limit_s:g} s") from error
        except MCPError as error:
            raise McpFailed(f"MCP server {self._server}: its tools cannot be listed: {error}") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool by the server's own name.

        Raises:
            ToolError: the server refused the call, or did not answer in time.
            McpFailed: the connection is gone.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        assert self._client is not None
        try:
            async with asyncio.timeout(self._call_limit_s + PROBE_LIMIT_S):
                return await self._or_gone(
                    self._client.call_tool(name, arguments, read_timeout_seconds=self._call_limit_s)
                )
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await self._check_alive(error)
            if error.code == REQUEST_TIMEOUT:
                raise ToolError(f"{name} gave no answer within {self._call_limit_s:g} s") from error
            raise ToolError(f"{name}: {error}") from error
        except TimeoutError as error:
            raise ToolError(f"{name} gave no answer within {self._call_limit_s:g} s") from error

    @property
    def alive(self) -> bool:
        """True while the connection is open, as far as is known."""
        return self._client is not None and self._owner is not None and not self._owner.done()

    async def aclose(self) -> None:
        """Close the connection and stop the server; safe to repeat. It goes on where this call is cancelled.

        Raises:
            McpFailed: it did not end within `CLOSE_LIMIT_S`.
        """
        owner = self._owner
        if owner is None:
            return
        self._leave.set()
        if not self._opened.is_set():
            owner.cancel()
        done, _ = await asyncio.wait((owner,), timeout=CLOSE_LIMIT_S)
        if not done:
            raise McpFailed(f"MCP server {self._server}: it did not end within {CLOSE_LIMIT_S:g} s")
        _log.debug("MCP server %s: %s", self._server, _reason(owner))

    async def _own(self) -> None:
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with AsyncExitStack() as stack:
            if isinstance(self._server, McpProgram):
                target: Any = _guarded(self._server)
            else:
                headers = {"Authorization": f"Bearer {self._server.token}"} if self._server.token else None
                http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
                target = streamable_http_client(self._server.url, http_client=http)
            client = Client(target, read_timeout_seconds=self._call_limit_s, cache=None)
            self._client = await stack.enter_async_context(client)
            self._opened.set()
            await self._leave.wait()

    async def _list_tools(self) -> list[Tool]:
        assert self._client is not None
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if len(tools) > MAX_TOOLS:
                break
            if cursor is None:
                return tools
        raise McpFailed(f"MCP server {self._server}: it lists more than {MAX_TOOLS} tools or {MAX_PAGES} pages")

    async def _check_alive(self, cause: Exception) -> None:
        # The code of a closed connection is also one that servers use for errors of their own.
        from mcp import MCPError

        assert self._client is not None
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                await self._or_gone(self._client.list_tools())
        except (MCPError, TimeoutError):
            raise McpFailed(f"MCP server {self._server}: the connection is closed") from cause

    async def _or_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result, or the failure of the connection where that ends first."""
        assert self._owner is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._owner), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        raise McpFailed(f"MCP server {self._server}: {_reason(self._owner)}")


def _reason(owner: asyncio.Task[None]) -> str:
    error = None if owner.cancelled() else owner.exception()
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseException", error.exceptions[0])
    return "the connection is closed" if error is None else told(error)


def _guarded(program: McpProgram) -> Any:
    from mcp import StdioServerParameters

    command, arguments = program.command[0], list(program.command[1:])
    if sys.platform.startswith("linux"):
        guard = Path(__file__).with_name("mcp_guard.py")
        names = ",".join(program.variables)
        arguments = ["-I", "-S", str(guard), str(os.getpid()), names, command, *arguments]
        command = sys.executable
    return StdioServerParameters(
        command=command,
        args=arguments,
        env=dict(program.variables),
        cwd=program.folder,
        encoding_error_handler="replace",
    )
