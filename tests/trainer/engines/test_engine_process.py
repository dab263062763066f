"""An engine in the main process, over the fake's server: boot failures, death, and the end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tide_trainer import types
from tide_trainer.backends.fake_core import FakeSettings
from tide_trainer.backends.fake_engine import FakeEngine
from tide_trainer.cluster.local import LocalProcesses
from tide_trainer.engine_client import EngineClient
from tide_trainer.errors import EngineFailed

SAMPLED = types.Sampling(max_new_tokens=1000)


@pytest.fixture
async def processes(tmp_path):
    local = LocalProcesses(tmp_path / "logs")
    yield local
    await local.stop_all()


@pytest.fixture
async def engine(tmp_path, processes, bigram_writer):
    bigram_writer(tmp_path / "m.safetensors", 0, 40)
    settings = FakeSettings(str(tmp_path / "m.safetensors"), max_context_tokens=2048, token_latency_s=0.05)
    engine = FakeEngine(types.RankId("local", 0), settings, processes, tmp_path)
    yield engine
    await engine.stop()


async def test_a_boot_that_fails_tells_the_end_of_the_log(tmp_path, processes):
    settings = FakeSettings(str(tmp_path / "absent.safetensors"))
    engine = FakeEngine(types.RankId("local", 0), settings, processes, tmp_path)
    with pytest.raises(EngineFailed, match=r"absent\.safetensors: cannot be read"):
        await engine.start()
    assert processes.children == ()
    await engine.stop()


async def test_a_killed_engine_is_seen_at_once(engine, runs):
    await engine.start()
    call = asyncio.create_task(engine.generate([3], SAMPLED))
    dead = asyncio.create_task(engine.wait_dead())
    async with asyncio.timeout(5):
        await runs(engine)
        os.kill(engine.child.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed):
            await call
        assert "exit code -9" in await dead
    with pytest.raises(EngineFailed):
        await engine.stats()


async def test_stop_ends_the_process_with_calls_in_flight_and_may_be_repeated(engine, processes, runs):
    await engine.start()
    call = asyncio.create_task(engine.generate([3], SAMPLED))
    await runs(engine)
    await engine.stop()
    with pytest.raises(EngineFailed):
        await call
    assert processes.children == ()
    await engine.stop()
    with pytest.raises(EngineFailed, match="not started"):
        await engine.generate([3], SAMPLED)


async def test_stop_before_start_does_nothing(engine):
    await engine.stop()


async def test_the_token_is_in_no_file_log_or_command_line(engine, tmp_path):
    await engine.start()
    assert engine.token
    command = Path(f"/proc/{engine.child.pid}/cmdline").read_bytes()  # noqa: ASYNC240 - a test
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(engine.token.encode() in text for text in [command, *texts])


async def test_an_answer_that_is_nonsense_is_a_failure_of_the_engine():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(EngineFailed, match="nonsense"):
        await client.generate([3], SAMPLED)
    await client.aclose()
    server.close()
