"""The router as a process: OpenAI's own client works unchanged, and no end of a process is missed."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from tide_sdk import asgi, codec
from tide_trainer.channel import Channel, serve_channel
from tide_trainer.cluster.local import ChildFailed, ChildProcess, LocalProcesses
from tide_trainer.segments import read_segment


class EngineServer:
    """A rollout rank's HTTP surface; answers `go left` and the end token."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.prompts: list[list[int]] = []

    async def __call__(self, scope, receive, send) -> None:
        body = asgi.parse_json(await asgi.read_body(scope, receive, 1 << 20))
        self.prompts.append(body["prompt_ids"])
        answer = {"token_ids": self.ids, "logprobs": [-0.5] * len(self.ids), "cached_tokens": 1}
        await asgi.send_json(send, 200, codec.dumps(answer | {"finish_reason": "stop", "version": 3}))

    async def start(self) -> str:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(self, lifespan="off", log_level="warning", access_log=False, ws="none")
        self.server = uvicorn.Server(config)
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self.task = asyncio.create_task(self.server._serve([listener]))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        self.server.should_exit = True
        await self.task


class Main:
    """The main process's side, which grants whatever asks."""

    def __init__(self, folder: Path, processes: LocalProcesses) -> None:
        self.folder, self.processes = folder, processes
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self.granting = True
        self.engine: EngineServer

    async def start(self, model_dir: Path) -> ChildProcess:
        self.server = await serve_channel(self.folder / "c" / "router", self.connect)
        argv = [sys.executable, "-m", "tide_trainer.router", "--control", str(self.server.path)]
        self.child = await self.processes.spawn("router", [*argv, "--model-dir", str(model_dir)], announce=True)
        self.channel = await asyncio.wait_for(self.connected, 20)
        return self.child

    def connect(self, channel: Channel) -> None:
        for name in ("turn", "call_failed", "call_cancelled"):
            channel.handle(name, lambda payload, name=name: self.events.append((name, payload)))
        channel.handle("call", lambda payload: self.on_call(channel, payload))
        self.connected.set_result(channel)

    def on_call(self, channel: Channel, payload: dict[str, Any]) -> None:
        self.events.append(("call", payload))
        if self.granting:
            channel.notify("grant", {"call": payload["call"], "rank": "local:0"})

    async def open(self, session: str) -> tuple[str, str]:
        key = secrets.token_urlsafe(16)
        data = {"session": session, "api_key": key, "max_context_tokens": 4000}
        await self.channel.request("open", data | {"sampling": {"temperature": 1.0, "max_new_tokens": 8}}, timeout_s=5)
        return f"{self.child.url}/sessions/{session}/v1", key


@pytest.fixture
async def main(tmp_path, folders, renderers):
    processes = LocalProcesses(tmp_path / "logs")
    main = Main(tmp_path, processes)
    renderer = renderers["chatml"]
    engine = EngineServer([*renderer.encode("go left"), *renderer.stop_token_ids])
    url = await engine.start()
    main.engine = engine
    try:
        await main.start(folders["chatml"])
        await main.channel.request("rank", {"rank": "local:0", "url": url}, timeout_s=5)
        yield main
    finally:
        await processes.stop_all(5.0)
        await main.server.close()
        await engine.stop()


async def test_the_official_client_works_unchanged(main):
    url, key = await main.open("a.task/with-slash")
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        talk: list[Any] = [{"role": "system", "content": "You play."}, {"role": "user", "content": "you see a door"}]
        for _ in range(3):
            answer: Any = await client.chat.completions.create(model="policy", messages=talk, logprobs=True, seed=1)
            assert answer.choices[0].message.content == "go left"
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage.prompt_tokens_details.cached_tokens == 1
            assert [item.logprob for item in answer.choices[0].logprobs.content] == [-0.5] * len(main.engine.ids)
            talk += [answer.choices[0].message, {"role": "user", "content": "yes"}]
        stream = await client.chat.completions.create(
            model="policy", messages=talk, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "go left"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(main.engine.ids)
        assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "you " * 5000}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(model="policy", messages=talk)
    account = await main.channel.request("close", {"session": "a.task/with-slash"}, timeout_s=5)
    (segment,) = [read_segment(data) for data in account["segments"]]
    assert list(segment.token_ids) == main.engine.prompts[-1] + main.engine.ids
    assert sum(segment.sampled) == 4 * len(main.engine.ids)
    assert {v for v, s in zip(segment.versions, segment.sampled, strict=True) if s} == {3}


async def test_the_official_blocking_client_works_too(main):
    url, key = await main.open("sync")

    def play() -> str | None:
        with openai.OpenAI(base_url=url, api_key=key) as client:
            messages: list[Any] = [{"role": "user", "content": "you"}]
            return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content

    assert await asyncio.to_thread(play) == "go left"


async def test_a_killed_router_is_noticed(main):
    reasons: list[str] = []
    main.channel.on_close(reasons.append)
    os.kill(main.child.pid, signal.SIGKILL)
    await asyncio.wait_for(main.channel.wait_closed(), 10)
    await asyncio.sleep(0)
    assert len(reasons) == 1
    assert await main.child.wait_dead() == -signal.SIGKILL


@pytest.mark.parametrize("end", ["SIGTERM", "channel"])
async def test_it_ends_with_its_channel_or_a_signal_and_answers_held_calls(end, main):
    url, key = await main.open("held")
    main.granting = False
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "you"}]
        request = asyncio.create_task(client.chat.completions.create(model="policy", messages=messages))
        async with asyncio.timeout(10):
            while not main.events:  # noqa: ASYNC110 - set by another process
                await asyncio.sleep(0.01)
        if end == "SIGTERM":
            os.kill(main.child.pid, signal.SIGTERM)
        else:
            main.channel.close()
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await request
    assert await asyncio.wait_for(main.child.wait_dead(), 10) == 0


async def test_a_wrong_model_folder_is_told_before_it_serves(tmp_path):
    processes = LocalProcesses(tmp_path / "logs")
    server = await serve_channel(tmp_path / "c" / "s", lambda _: None)
    argv = [sys.executable, "-m", "tide_trainer.router", "--control", str(server.path), "--model-dir", str(tmp_path)]
    with pytest.raises(ChildFailed, match=r"tokenizer_config\.json is missing"):
        await processes.spawn("router", argv, announce=True)
    await processes.stop_all(2.0)
    await server.close()
