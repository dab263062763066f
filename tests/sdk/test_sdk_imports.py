"""Importing the SDK is cheap, and its public names are there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tide_sdk


def fresh(code: str) -> dict:
    """What a fresh interpreter prints as JSON after `code`."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


MEASURE = (
    "import json, sys, time; t = time.process_time(); {}; "
    "print(json.dumps([time.process_time() - t, sorted(sys.modules)]))"
)
HEAVY = {"asyncio", "gymnasium", "httpx", "mcp", "openai", "PIL", "pydantic", "uvicorn"}
TRIES = 3
"""The least CPU of several fresh interpreters counts: what else the machine does can only add to it."""


@pytest.mark.parametrize("code", ["import tide_sdk", "from tide_sdk import Agent, AgentResult, agent, chat_agent"])
def test_the_import_is_cheap_and_loads_nothing_heavy(code):
    tries = [fresh(MEASURE.format(code)) for _ in range(TRIES)]
    assert min(cpu_s for cpu_s, _ in tries) < 0.2
    assert not HEAVY & set(tries[0][1])


def test_httpx_and_uvicorn_are_not_loaded_for_a_client_or_an_environment():
    _, modules = fresh(
        MEASURE.format("from tide_sdk import *; GatewayClient('http://a'); ModelEndpoint('http://a/v1')")
    )
    assert not (HEAVY - {"asyncio", "pydantic"}) & set(modules)


@pytest.mark.parametrize("name", tide_sdk.__all__)
def test_every_public_name_is_there(name):
    assert getattr(tide_sdk, name).__module__.startswith("tide_sdk.")
    assert name in dir(tide_sdk)


def test_the_decorator_is_not_hidden_by_a_module():
    _, names = fresh("import json, tide_sdk.runner, tide_sdk; print(json.dumps([0, [type(tide_sdk.agent).__name__]]))")
    assert names == ["function"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = tide_sdk.nothing
