"""A router and an engine in their own processes, and the main process's side of the router, which grants every call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tide_trainer import types
from tide_trainer.backends.fake_core import FakeSettings
from tide_trainer.backends.fake_engine import FakeEngine
from tide_trainer.channel import Channel, ChannelServer, serve_channel
from tide_trainer.cluster.local import ChildProcess, LocalProcesses
from tide_trainer.engine_client import EngineClient

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    f"{{% for m in messages %}}{START}{{{{ m.role }}}}\n{{{{ m.content or '' }}}}{END}\n{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)
NEVER = -1e9
"""A logit of what the engine must not sample: an early end would make turns of different lengths."""
MAX_CONTEXT_TOKENS = 8192
HOLD_LIMIT_S = 60.0


@dataclass
class Stack:
    """What runs.

    Attributes:
        channel: to the router.
        engine: a client of the engine itself.
        granting: False keeps calls held, in `held`.
    """

    router: ChildProcess
    channel: Channel
    engine: EngineClient
    engine_process: ChildProcess
    max_new_tokens: int
    granting: bool = True
    held: deque[str] = field(default_factory=deque)
    _more_held: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, session: str) -> tuple[str, str]:
        """Open a session; its base URL and key."""
        key = secrets.token_urlsafe(16)
        sampling = {"temperature": 1.0, "max_new_tokens": self.max_new_tokens}
        order = {"session": session, "api_key": key, "max_context_tokens": MAX_CONTEXT_TOKENS, "sampling": sampling}
        await self.channel.request("open", order, timeout_s=30)
        return f"{self.router.url}/sessions/{session}/v1", key

    async def close(self, session: str) -> dict[str, Any]:
        """Close a session; what it captured."""
        return await self.channel.request("close", {"session": session}, timeout_s=30)

    def on_call(self, event: dict[str, Any]) -> None:
        """Grant, or hold."""
        if self.granting:
            self.grant(event["call"])
        else:
            self.held.append(event["call"])
            self._more_held.set()

    async def until_held(self, num_calls: int) -> None:
        """Wait until so many calls are held."""
        while len(self.held) < num_calls:
            self._more_held.clear()
            await asyncio.wait_for(self._more_held.wait(), HOLD_LIMIT_S)

    def grant(self, call: str) -> None:
        """Release a call to the engine."""
        self.channel.notify("grant", {"call": call, "rank": "local:0"})


def write_model(folder: Path) -> Path:
    """A bigram model over bytes and a chat template; the two special tokens are never sampled."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([START, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([START, END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    table = np.full((len(vocabulary),) * 2, NEVER, np.float32)
    table[:, [vocabulary[letter] for letter in "abcdefgh"]] = 0.0
    save_file({"logits": table}, folder / "model.safetensors")
    return folder


@contextlib.asynccontextmanager
async def stack(folder: Path, *, token_latency_s: float, max_new_tokens: int, max_running: int) -> AsyncIterator[Stack]:
    """Start both processes; they end with the context."""
    model = write_model(folder / "model")
    processes = LocalProcesses(folder / "logs")
    settings = FakeSettings(
        str(model / "model.safetensors"),
        kv_tokens=1 << 22,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_running=max_running,
        token_latency_s=token_latency_s,
    )
    rank = types.RankId("local", 0)
    engine = FakeEngine(rank, settings, processes, folder / "engine")
    server: ChannelServer | None = None
    try:
        info = await engine.start()
        connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        made: list[Stack] = []

        def connect(channel: Channel) -> None:
            channel.handle("call", lambda event: made[0].on_call(event))
            for name in ("turn", "call_failed", "call_cancelled"):
                channel.handle(name, lambda event: None)
            connected.set_result(channel)

        server = await serve_channel(folder / "c" / "router", connect)
        argv = [sys.executable, "-m", "tide_trainer.router", "--control", str(server.path), "--model-dir", str(model)]
        router = await processes.spawn("router", argv, announce=True)
        channel = await asyncio.wait_for(connected, 30)
        token = engine.token
        await channel.request("rank", {"rank": "local:0", "url": info.url, "token": token}, timeout_s=10)
        client = EngineClient(info.url, token=token, max_in_flight=1024)
        made.append(Stack(router, channel, client, engine.child, max_new_tokens))
        yield made[0]
        await client.aclose()
    finally:
        if server is not None:
            await server.close()
        await processes.stop_all()
