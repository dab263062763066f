"""The SDK imports with its base dependencies alone: agents and environment authors install nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

EXTRAS_ONLY = (
    *("alembic", "aiosqlite", "fastapi", "gymnasium", "httptools", "jinja2", "mcp", "minigrid", "numpy", "openai"),
    *("orjson", "PIL", "pydantic_ai", "rich", "safetensors", "sqlalchemy", "starlette", "tokenizers", "torch"),
    *("transformers", "uvloop", "vllm"),
)
# Shared by the two services, which have its extras; used by `tide-env serve` where the extra `serve` is installed.
NEEDS_AN_EXTRA = ("tide_sdk.migrations", "tide_sdk.answering")

BLOCK = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
"""
PROGRAM = """
import importlib, pkgutil
needs_an_extra = sys.argv[2].split(",")
import tide_sdk
for module in pkgutil.walk_packages(tide_sdk.__path__, "tide_sdk."):
    if module.name not in needs_an_extra:
        importlib.import_module(module.name)
print("all imported")
"""


def test_the_sdk_imports_without_any_extra():
    command = [sys.executable, "-c", BLOCK + PROGRAM, ",".join(EXTRAS_ONLY), ",".join(NEEDS_AN_EXTRA)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all imported"


PLAY = """
import asyncio, json, threading, uvicorn
from tide_sdk import (AgentContext, BlockingContext, Environment, EnvironmentServer, ModelEndpoint, Start, Step, agent,
                      run)
from tide_sdk import asgi, codec

class Echo(Environment):
    name = "echo"
    def start(self, task):
        return Start("say yes")
    def step(self, message):
        return Step("ok", reward=1.0, terminated=message.text == "yes")

async def model(scope, receive, send):
    await asgi.read_body(scope, receive, 1 << 20)
    choice = {"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
    await asgi.send_json(send, 200, codec.dumps({"choices": [choice], "usage": {}}))

def serve(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        threading.Event().wait(0.01)
    return "http://127.0.0.1:%d" % server.servers[0].sockets[0].getsockname()[1]

@agent
async def quick(ctx: AgentContext):
    while not ctx.done:
        await ctx.step(await ctx.generate())

@agent(max_turns=3)
def plain(ctx: BlockingContext):
    while not ctx.done:
        ctx.step(ctx.generate())

place, url = serve(EnvironmentServer(Echo)), serve(model)
results = [
    run(player, environment="echo", gateway=place, model=ModelEndpoint(url + "/v1"))[0] for player in (quick, plain)
]
print(json.dumps([[result.outcome, result.reward, result.error] for result in results]))
"""


def test_an_environment_and_agents_of_both_kinds_play_without_any_extra():
    command = [sys.executable, "-c", BLOCK + PLAY, ",".join(EXTRAS_ONLY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["completed", 1.0, None]] * 2


def test_the_base_dependencies_are_few(tree):
    project = tomllib.loads((tree.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {re.split(r"[<>=~! \[;]", needed)[0] for needed in project["dependencies"]} == {
        "httpx",
        "pydantic",
        "uvicorn",
    }
