"""Hostile callers against a real gateway process: refused with the code that says why, memory bounded, others served."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import resource
from collections.abc import AsyncIterator, Iterator

import pytest
from hostile import GO, MIB, Answer, Bystander, Hostile, Memory, action, bystander, counted, read_answer

from tide_gateway.load import LoadLimits
from tide_sdk.client import GatewayClient
from tide_sdk.serve import raise_file_limit

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"
SLACK_BYTES = 64 * MIB
BUDGET_BYTES = LoadLimits().max_bytes
FREE_TURNS = 30
"""Turns of the bystander that an attack is measured by, or that it has to play while one goes on."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator:
    from conftest import start_gateway  # pyright: ignore[reportMissingImports]

    raise_file_limit()
    tokens = {"TIDE_GATEWAY_TOKENS": f"ann/operator:{ANN},bob:{BOB}"}
    running = start_gateway(tmp_path_factory.mktemp("hostile"), tokens, capacity=256)
    yield running
    assert running.stop() == 0, running.log()
    assert "Traceback" not in running.log()


@pytest.fixture
async def ann(site) -> AsyncIterator[Hostile]:
    caller = Hostile(site.url, ANN)
    yield caller
    await caller.close()


@pytest.fixture
async def bob(site) -> AsyncIterator[Bystander]:
    async with bystander(site.url, BOB) as playing:
        await more_turns(playing)
        yield playing


async def more_turns(bob: Bystander, num: int = FREE_TURNS) -> None:
    """Wait until the bystander has played so many more turns."""
    target = bob.turns + num
    async with asyncio.timeout(60):
        while bob.turns < target:
            await asyncio.sleep(0.01)
