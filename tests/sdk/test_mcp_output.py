"""What an MCP server prints that is no message, or has no end, stays with the guard."""

from __future__ import annotations

import json
import sys

import pytest

from tide_sdk.environment import StartInfo
from tide_sdk.mcp_environment import McpEnvironment
from tide_sdk.mcp_guard import MAX_LINE_BYTES, MAX_NOISE_BYTES, Messages
from tide_sdk.wire import Message

SERVER = """
import json, os, sys

def answer(asked, result):
    os.write(1, json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode() + b"\\n")

if "noise" in sys.argv:
    os.write(1, b"loading...\\n" * 50_000)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {"name": "s", "version": "1"}
        answer(asked, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
    elif asked["method"] == "tools/list":
        answer(asked, {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]})
    elif asked["method"] == "tools/call" and "flood" in sys.argv:
        while True:
            os.write(1, b"x" * (1 << 20))
    elif asked["method"] == "tools/call" and "last" in sys.argv:
        answer(asked, {"content": [{"type": "text", "text": "y" * 500_000}]})
        os._exit(0)
    elif asked["method"] == "tools/call":
        answer(asked, {"content": [{"type": "text", "text": "seen"}]})
"""
LOOK = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)

    def make(how: str) -> McpEnvironment:
        return McpEnvironment(command=[sys.executable, str(tmp_path / "server.py"), how], call_limit_s=60)

    return make


async def looked(environment: McpEnvironment) -> str:
    try:
        await environment.start(StartInfo({"prompt": "go"}, 1, None, "train"))
        step = await environment.step(Message.model_validate({"role": "assistant", "tool_calls": [LOOK]}))
        return json.dumps(step.messages)
    finally:
        await environment.end(None)


async def test_lines_that_are_no_messages_do_not_reach_the_client(environment, caplog):
    assert "seen" in await looked(environment("noise"))
    assert not [record for record in caplog.records if "parse" in record.getMessage()]


async def test_an_answer_without_an_end_ends_the_task_at_once_and_not_the_servers_memory(environment):
    with pytest.raises(RuntimeError, match="the connection is closed"):
        await looked(environment("flood"))


async def test_the_last_answer_of_a_server_that_ends_arrives_whole(environment):
    assert "[cut: 500000 characters" in await looked(environment("last"))


def test_messages_pass_whole_however_they_are_cut_and_noise_is_told_within_bounds(tmp_path):
    passed, noise = ((tmp_path / name) for name in ("passed", "noise"))
    with passed.open("wb") as good, noise.open("wb") as bad:
        messages = Messages(good.fileno(), bad.fileno())
        sent = b'{"a": 1}\nhello\n  [1]\n\n{"b": "' + b"z" * 100 + b'"}\n'
        assert all(messages.take(sent[place : place + 3]) for place in range(0, len(sent), 3))
        assert all(messages.take(b"noise\n" * 10_000) for _ in range(10))
        assert messages.take(b"{" + b"q" * (MAX_LINE_BYTES - 1))
        assert not messages.take(b"q")
    assert passed.read_bytes() == b'{"a": 1}\n  [1]\n{"b": "' + b"z" * 100 + b'"}\n'
    told = noise.read_bytes()
    assert told.startswith(b"no message: hello\n")
    assert told.endswith(b"printed a message of more than 16777216 bytes\n")
    assert sum(len(line) - len(b"no message: ") for line in told.splitlines()[:-1]) <= MAX_NOISE_BYTES
