"""A real MCP server of the official package: notes, kept in its memory.

`python mcp_notes_server.py [--stubborn PID_FILE]`, or `build()` for one in this process. A stubborn one and the child
that it starts ignore every polite request to end; their process ids go to the file.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import AudioContent, CallToolResult, EmbeddedResource, ImageContent, TextContent, TextResourceContents

PNG = base64.b64encode(b"\x89PNG not really").decode()


def build() -> MCPServer:
    server = MCPServer("notes", log_level="ERROR")
    notes: list[str] = []

    @server.tool()
    def prepare(first: str = "") -> str:
        """Begin with a note."""
        if first == "bad":
            raise ToolError("no such beginning")
        notes.extend([first] if first else [])
        return "ready"

    @server.tool(name="write.note")
    def write(text: str, times: int = 1) -> str:
        """Keep a note."""
        notes.extend([text] * times)
        return f"kept {len(notes)}"

    @server.tool(name="write note")
    def write_loudly(text: str) -> str:
        """Keep a note in capitals."""
        notes.append(text.upper())
        return f"kept {len(notes)}"

    @server.tool()
    def count() -> dict[str, int]:
        """How many notes there are."""
        return {"notes": len(notes)}

    @server.tool()
    def grade() -> dict[str, float]:
        """Half a point a note."""
        return {"reward": len(notes) / 2}

    add_tools_about_the_process(server)
    return server


def add_tools_about_the_process(server: MCPServer) -> None:
    @server.tool()
    def look() -> CallToolResult:
        """Everything that a result may hold."""
        resource = TextResourceContents(uri="note://1", text="in a resource")
        return CallToolResult(
            content=[
                TextContent(type="text", text="a picture:"),
                ImageContent(type="image", data=PNG, mime_type="image/png"),
                AudioContent(type="audio", data=PNG, mime_type="audio/wav"),
                EmbeddedResource(type="resource", resource=resource),
            ]
        )

    @server.tool()
    def fail() -> str:
        """Tell an error."""
        raise ToolError("the pen is empty")

    @server.tool()
    def variables() -> list[str]:
        """The names of this process's variables."""
        return sorted(os.environ)

    @server.tool()
    def pid() -> int:
        """This process's id."""
        return os.getpid()

    @server.tool()
    async def sleep() -> str:
        """Never answer."""
        await asyncio.sleep(3600)
        return "late"

    @server.tool()
    def crash() -> str:
        """End the process."""
        os._exit(3)


def ignore_everything(file: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    part = file.with_suffix(".part")
    part.write_text(f"{os.getpid()} {child.pid}")
    part.replace(file)


def main(arguments: list[str]) -> None:
    if "--stubborn" in arguments:
        ignore_everything(Path(arguments[arguments.index("--stubborn") + 1]))
    build().run()
    if "--stubborn" in arguments:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
