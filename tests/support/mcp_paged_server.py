"""MCP servers that list their tools in pages of two; one tool answers with an error that has a bad code."""

from __future__ import annotations

from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.types import CONNECTION_CLOSED, CallToolResult, ListToolsResult, TextContent, Tool


def build(num_tools: int) -> Server:
    async def list_tools(context, params):
        first = int(params.cursor) if params is not None and params.cursor else 0
        last = min(first + 2, num_tools)
        tools = [Tool(name=f"tool {number}", input_schema={"type": "object"}) for number in range(first, last)]
        return ListToolsResult(tools=tools, next_cursor=str(last) if last < num_tools else None)

    async def call_tool(context, params):
        if params.name == "tool 1":
            raise MCPError(CONNECTION_CLOSED, "an error with the code of a closed connection")
        return CallToolResult(content=[TextContent(type="text", text=params.name)])

    return Server("paged", on_list_tools=list_tools, on_call_tool=call_tool)
