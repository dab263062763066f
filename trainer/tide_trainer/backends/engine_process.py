"""A rollout engine in the main process: spawns the engine's server, waits for it, calls it, sees its death, ends it."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tide_trainer import types
from tide_trainer.backends import engine_serve
from tide_trainer.engine_client import EngineClient
from tide_trainer.errors import EngineFailed

_STOP_S = 10.0


class Child(Protocol):
    """A spawned process (as `cluster.local.ChildProcess`)."""

    @property
    def url(self) -> str:
        """The URL that it announced."""
        ...

    async def wait_dead(self) -> int:
        """Waits for its end; the exit code."""
        ...

    def tail(self) -> str:
        """The end of its log."""
        ...


class Spawner(Protocol):
    """Starts and ends processes (as `cluster.local.LocalProcesses`)."""

    async def spawn(
        self,
        name: str,
        argv: list[str],
        *,
        env: Mapping[str, str] | None = None,
        announce: bool = False,
        ready_timeout_s: float = 60.0,
    ) -> Any:
        """Starts a child and waits for its announcement; returns a `Child`. A failure names the log's tail."""
        ...

    async def stop(self, child: Any, deadline_s: float = 10.0) -> None:
        """Ends a child and its tree; idempotent."""
        ...


class EngineProcess:
    """`protocols.RolloutEngine` over a server process.

    Args:
        rank: the rollout rank.
        module: the server's module, run with `python -m`.
        settings: the server's settings dataclass; its token is made here.
        processes: starts and ends the process.
        directory: where the settings file is written.
        env: variables of the server process beside the inherited ones.
        ready_timeout_s: longest boot.
        call_timeout_s: deadline of a call; a weight update has this too.
    """

    def __init__(
        self,
        rank: types.RankId,
        module: str,
        settings: Any,
        processes: Spawner,
        directory: str | Path,
        *,
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = 300.0,
        call_timeout_s: float = 120.0,
    ) -> None:
        self._rank = rank
        self._module = module
        self._settings = settings
        self._processes = processes
        self._directory = Path(directory)
        self._env = env
        self._ready_timeout_s = ready_timeout_s
        self._call_timeout_s = call_timeout_s
        self._token = settings.token
        self._child: Child | None = None
        self._client: EngineClient | None = None

    @property
    def rank(self) -> types.RankId:
        """The rank that this engine is."""
        return self._rank

    @property
    def token(self) -> str | None:
        """The bearer token that other clients of the server (the router) need; None without one."""
        return self._token

    @property
    def child(self) -> Any:
        """The server's process as the spawner gave it (its CPU time is measured there); None before `start`."""
        return self._child

    async def start(self) -> types.EngineInfo:
        """Boots the engine's process and waits until it serves. Cancelling ends it.

        Raises:
            EngineFailed: it died or was late; the message ends with the tail of its log.
        """
        if self._child is not None:
            raise EngineFailed(f"rollout rank {self._rank} is started already")
        name = f"rollout-{self._rank.worker}-{self._rank.index}".replace("/", "_")
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{name}.settings.json"
        engine_serve.write_settings(path, self._settings)
        argv = [sys.executable, "-m", self._module, "--settings", str(path)]
        try:
            child = await self._processes.spawn(
                name, argv, env=self._env, announce=True, ready_timeout_s=self._ready_timeout_s
            )
        except Exception as error:
            raise EngineFailed(f"rollout rank {self._rank} did not boot: {error}") from error
        finally:
            path.unlink(missing_ok=True)
        self._child = child
        self._client = EngineClient(child.url, token=self._token, timeout_s=self._call_timeout_s)
        try:
            health = await self._client.health()
        except BaseException:
            await self.stop()
            raise
        sizes = (health.kv_tokens, health.block_tokens, health.max_context_tokens)
        return types.EngineInfo(self._rank, child.url, *sizes, health.version)

    async def update_weights(self, update: types.WeightUpdate) -> types.WeightReceipt:
        """Loads a version in place; see `protocols.RolloutEngine` and `EngineClient.update_weights`."""
        begin_s = time.monotonic()
        num_tensors = await self._up().update_weights(update)
        return types.WeightReceipt(self._rank, update.version, num_tensors, time.monotonic() - begin_s)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: types.Sampling, images: Sequence[types.ImageSpan] = ()
    ) -> types.Completion:
        """Samples one completion. Raises EngineFailed or EngineRefused."""
        return await self._up().generate(prompt_ids, sampling, images=images)

    async def stats(self) -> types.EngineStats:
        """The engine's live numbers. Raises EngineFailed."""
        return await self._up().stats()

    async def wait_dead(self) -> str:
        """Waits, without a deadline of its own, until the process has ended; says how. Safe to cancel.

        Raises:
            EngineFailed: it was never started.
        """
        child = self._child
        if child is None:
            raise EngineFailed(f"rollout rank {self._rank} is not started")
        code = await child.wait_dead()
        return f"rollout rank {self._rank} ended with exit code {code}; the end of its log:\n{child.tail()}"

    async def stop(self) -> None:
        """Ends the engine's processes within 10 s; safe to call twice and before `start`."""
        child, self._child = self._child, None
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
        if child is not None:
            await self._processes.stop(child, _STOP_S)

    def _up(self) -> EngineClient:
        if self._client is None:
            raise EngineFailed(f"rollout rank {self._rank} is not started")
        return self._client


def new_token() -> str:
    """A bearer token for one engine."""
    return secrets.token_urlsafe(32)
