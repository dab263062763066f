"""S2: 50 turns of 1280x720 screenshots through gateway, agent and router: nothing is lost, and nothing piles up."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from pathlib import Path

import pytest
import uvicorn
from gateway_cluster import GatewayCluster
from screenshot_environment import shown
from vision_chat import make_vision_chat

from tide_sdk import asgi, codec
from tide_sdk.agents import Agent
from tide_sdk.client import GatewayClient
from tide_sdk.context_images import without_bytes
from tide_sdk.images import digest_of, image_urls, read_reference
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import TaskSpec
from tide_sdk.runner import run_task
from tide_trainer.channel import Channel, serve_channel
from tide_trainer.cluster.local import LocalProcesses
from tide_trainer.images import ImageStore, check_spans
from tide_trainer.router.renderer import Renderer
from tide_trainer.segments import read_segment
from tide_trainer.types import ImageSpan

SUPPORT = Path(__file__).parents[2] / "support"
TURNS, MEASURED = 50, (20, 50)
SIZE = {"width": 1280, "height": 720, "noisy_rows": 180}
"""About 700 KB a picture."""
MAX_GROWTH_BYTES = 10 * 1024 * 1024
"""From turn 20 to 50; the 30 pictures of these turns alone are 21 MB, and a third more as text."""


class SeeingEngine:
    """A rank that looks at the images of each prompt, in the run's store, and says `click`."""

    def __init__(self, renderer: Renderer, store: ImageStore) -> None:
        self.renderer, self.store = renderer, store
        self.ids = [*renderer.encode_after("click"), *renderer.stop_token_ids]
        self.seen: list[list[str]] = []

    async def __call__(self, scope, receive, send) -> None:
        asked = asgi.parse_json(await asgi.read_body(scope, receive, 1 << 20))
        spans = [ImageSpan(*span) for span in asked.get("images", ())]
        check_spans(asked["prompt_ids"], spans, self.renderer.images.placeholder_id)
        assert all(self.store.path(span.digest).is_file() for span in spans)
        self.seen.append([span.digest for span in spans])
        answer = {"token_ids": self.ids, "logprobs": [-0.5] * len(self.ids), "cached_tokens": 0}
        await asgi.send_json(send, 200, codec.dumps(answer | {"finish_reason": "stop", "version": 3}))


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    command = [sys.executable, "-m", "tide_sdk.cli", "serve", "screenshot_environment:Screenshots"]
    command += ["--uds", "{uds}", "--capacity", "{capacity}"]
    table = {"runtime": "process", "capacity": 4, "servers": 1, "command": command}
    with GatewayCluster(tmp_path / "gateway", f"sqlite:///{tmp_path / 'gateway.db'}", {"screens": table}) as cluster:
        cluster.start_all()
        yield cluster


@pytest.fixture
async def rank(tmp_path):
    """(engine, its URL, the router's process, the channel to it) of a model that takes images."""
    folder = make_vision_chat(tmp_path / "model")
    engine = SeeingEngine(Renderer(folder), ImageStore(tmp_path / "images"))
    server = uvicorn.Server(uvicorn.Config(engine, port=0, lifespan="off", log_level="warning", ws="none"))
    serving = asyncio.create_task(server.serve())
    connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    def connect(channel: Channel) -> None:
        channel.handle("call", lambda call: channel.notify("grant", {"call": call["call"], "rank": "local:0"}))
        for name in ("turn", "call_failed", "call_cancelled"):
            channel.handle(name, lambda _: None)
        connected.set_result(channel)

    processes = LocalProcesses(tmp_path / "logs")
    control = await serve_channel(tmp_path / "c" / "router", connect)
    try:
        argv = [sys.executable, "-m", "tide_trainer.router", "--control", str(control.path)]
        argv += ["--model-dir", str(folder), "--image-folder", str(engine.store.folder)]
        child = await processes.spawn("router", argv, announce=True)
        channel = await asyncio.wait_for(connected, 30)
        while not server.started:  # noqa: ASYNC110 - uvicorn sets no event
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        await channel.request("rank", {"rank": "local:0", "url": url}, timeout_s=10)
        yield engine, child, channel
    finally:
        await processes.stop_all(5.0)
        await control.close()
        server.should_exit = True
        await serving


async def test_s2_fifty_turns_of_screenshots_arrive_whole_and_in_bounded_memory(cluster, rank):
    engine, child, channel = rank
    key = secrets.token_urlsafe(16)
    data = {"session": "s", "api_key": key, "max_context_tokens": 20_000}
    await channel.request("open", data | {"sampling": {"temperature": 1.0, "max_new_tokens": 8}}, timeout_s=10)
    pids = {"gateway": cluster.pid(), "agent": os.getpid(), "router": child.pid}
    measured: list[dict[str, int]] = []
    kept = []

    async def play(ctx) -> None:
        while not ctx.done:
            await ctx.step(await ctx.generate())
            if ctx.turn in MEASURED:
                measured.append({name: rss_bytes(pid) for name, pid in pids.items()})
        kept.extend(ctx.messages)

    spec = TaskSpec("screens", "k", task={"turns": TURNS, **SIZE}, seed=7)
    async with GatewayClient(cluster.urls[0], references=True, cache_bytes=4 * 1024 * 1024) as gateway:
        endpoint = ModelEndpoint(f"{child.url}/sessions/s/v1", model="policy", api_key=key, image_references=True)
        async with endpoint:
            result = await run_task(Agent("test:play", play), spec, gateway, endpoint)
    assert (result.outcome, result.reward, result.turns, result.error) == ("completed", 1.0, TURNS, None)

    pictures = [shown(7, turn, **SIZE) for turn in range(TURNS + 1)]
    assert min(len(picture) for picture in pictures) > 650_000
    for picture in pictures:
        assert engine.store.read(digest_of(picture)) == picture
    *digests, last = [digest_of(picture) for picture in pictures]
    assert max(map(len, engine.seen)) == 9
    assert [seen[-1] for seen in engine.seen] == digests, "each turn's newest image is the one that it is about"
    closed = await channel.request("close", {"session": "s"}, timeout_s=10)
    segments = [read_segment(segment) for segment in closed["segments"]]
    assert {span.digest for segment in segments for span in segment.images} == set(digests)

    # The record names all images and holds none.
    named = [ref.digest for url in image_urls(kept) if (ref := read_reference(url)) is not None]
    assert named == [*digests, last]
    assert len(codec.dumps(without_bytes(kept))) < 50_000

    before, after = measured
    growth = {name: after[name] - before[name] for name in pids}
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
