"""The agents of `examples/agents` play without a trainer against any OpenAI-compatible server, unchanged."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from pathlib import Path

import pytest
import uvicorn
from toy_environment import TURNS, Toy

from tide_sdk.client import GatewayClient
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import TaskSpec
from tide_sdk.runner import run_tasks
from tide_sdk.server import EnvironmentServer

AGENTS = Path(__file__).parents[3] / "examples" / "agents"


@pytest.fixture
async def toy_url():
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(EnvironmentServer(Toy), ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await asyncio.wait_for(serving, 10)


@pytest.mark.parametrize("name", ["openai_agent", "pydantic_ai_agent"])
async def test_it_plays_an_environment_through_the_context_s_url(name, served, toy_url):
    spec = importlib.util.spec_from_file_location(name, AGENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = served.says("left", "right", "left")
    served.open(max_context_tokens=4000, max_new_tokens=64)
    async with (
        GatewayClient(toy_url) as gateway,
        ModelEndpoint(served.base_url(), model="policy", api_key="key-of-s") as model,
    ):
        (result,) = await run_tasks(module.play, [TaskSpec("toy", "t/0")], gateway, model)
    assert (result.outcome, result.reward, result.turns, result.error) == ("completed", 0.75, TURNS, None)
    (segment,), account = served.captured()
    assert (account["num_calls"], account["num_breaks"]) == (TURNS, 0)
    assert sum(segment.sampled) == sum(map(len, engine.sampled))
