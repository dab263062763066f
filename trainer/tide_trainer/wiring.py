"""Builds a run's objects and processes from its configuration, and takes them down again.

    model folder -> | gateway, router, agent workers, training backend |  -> warm start -> train loop
                    | rollout engines (slow to boot, awaited last)     |

Every process is a child in `LocalProcesses`; whatever happens, `wired` ends them all before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tide_sdk.client import GatewayClient
from tide_trainer.backends.no_training import NoTraining
from tide_trainer.channel import Channel, ChannelServer, serve_channel
from tide_trainer.cluster.local import ChildProcess, LocalProcesses
from tide_trainer.errors import ProcessFailed, TrainerError
from tide_trainer.factory import make_backend, make_engine
from tide_trainer.loop.evaluation import Evaluation
from tide_trainer.loop.ports import RouterPort, WorkerPool
from tide_trainer.loop.warm_start import FIRST_VERSION
from tide_trainer.persistence.repository import RunRepository
from tide_trainer.resume import Life
from tide_trainer.run_directory import RunDirectory
from tide_trainer.settings import TrainerSettings, gateway_token
from tide_trainer.types import RankId
from tide_trainer.wired import Wired

_LOG = logging.getLogger(__name__)
_READY_S = 60.0
_STOP_S = 10.0


@contextlib.asynccontextmanager
async def wired(
    settings: TrainerSettings,
    directory: RunDirectory,
    repository: RunRepository,
    record: Callable[..., None],
    keep_samples: Callable[[str, Evaluation], None],
    *,
    trains: bool = True,
    life: Life | None = None,
) -> AsyncIterator[Wired]:
    """Boots everything, without `trains` no Actor ranks; waits for no engine. On exit ends all in order within 15 s."""
    life = life or Life()
    checkpoint = life.resumption.checkpoint if life.resumption else None
    processes = LocalProcesses(directory.logs, guard_keeps=() if life.lock is None else (life.lock,))
    async with contextlib.AsyncExitStack() as stack:
        sockets = await _temporary(stack, processes, Path(tempfile.mkdtemp(prefix="tide-")))
        stack.push_async_callback(_shielded, lambda: processes.stop_all(_STOP_S))
        record("phase", phase="booting")
        model = await _model_folder(settings, directory, processes, made=life.resumption is not None)
        peers = _Peers()
        server = await serve_channel(sockets / "control.sock", peers.connected)
        stack.push_async_callback(server.close)
        booting = _Boot(settings, directory, processes, server, peers, model)
        # The engines hold the model folder's weights; a sync brings them to what the Actor ranks begin with.
        version = FIRST_VERSION if settings.warm_start.enabled or checkpoint else 0
        engines = {
            rank: make_engine(settings, rank, model, version, processes, directory.path / "engines", directory.images)
            for rank in (RankId("rollout", index) for index in range(settings.rollout.num_ranks))
        }
        weights = await _temporary(stack, processes, _weights_folder(sockets))
        backend = make_backend(settings, model, processes, weights, directory.images) if trains else NoTraining()
        async with contextlib.AsyncExitStack() as failing:
            engines_up = asyncio.gather(*(engine.start() for engine in engines.values()))
            failing.callback(_given_up, engines_up)
            gateway, router, workers, demonstrators, _ = await _together(
                booting.gateway(),
                booting.router(),
                booting.workers("worker", settings.agent.entry, settings.agent.num_workers),
                booting.workers(
                    "demonstrator", settings.warm_start.demonstrator, 1 if settings.warm_start.enabled else 0
                ),
                backend.start(checkpoint),
            )
            await stack.enter_async_context(gateway)
            parts = Wired(
                *(settings, directory, repository, record, keep_samples, processes, model),
                *(backend, engines, engines_up, gateway, router, workers, demonstrators, life.resumption),
            )
            stack.push_async_callback(_shielded, parts.close)
            failing.pop_all()
        yield parts


def _given_up(engines_up: asyncio.Future[Any]) -> None:
    """Ends the boot of the engines where another part failed or the run was stopped: nobody awaits its outcome."""

    def ended(boot: asyncio.Future[Any]) -> None:
        if not boot.cancelled() and not isinstance(error := boot.exception(), (asyncio.CancelledError, type(None))):
            _LOG.error("the engines failed too: %s", error)

    engines_up.cancel()
    engines_up.add_done_callback(ended)


async def _together(*coroutines: Any) -> list[Any]:
    """Runs boots side by side; the first failure cancels the others and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _shielded(close: Callable[[], Any]) -> None:
    """Closes although the run is being cancelled; a failure to close is logged, for others still have to close."""
    try:
        await asyncio.shield(asyncio.ensure_future(close()))
    except TrainerError as error:
        _LOG.error("closing failed: %s", error)


async def _temporary(stack: contextlib.AsyncExitStack, processes: LocalProcesses, folder: Path) -> Path:
    """Has a folder removed at the end, also where this process is killed."""
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    await processes.remove_at_end(folder)
    return folder


def _weights_folder(fallback: Path) -> Path:
    """Where versions are published: a tmpfs where the machine has one."""
    shared = Path("/dev/shm")  # noqa: S108 - the folder in it is made with mode 0700 and a random name
    return Path(tempfile.mkdtemp(prefix="tide-weights-", dir=shared if os.access(shared, os.W_OK) else fallback))


async def _model_folder(
    settings: TrainerSettings, directory: RunDirectory, processes: LocalProcesses, *, made: bool
) -> Path:
    """The configured folder, or a tiny model made in a process of its own; `made` by an earlier life, it is taken."""
    model = settings.model
    if model.path:
        return Path(model.path)
    wanted = directory.path / "model.json"
    if made and not wanted.exists() and (directory.model / "config.json").is_file():
        return directory.model
    await asyncio.to_thread(shutil.rmtree, directory.model, ignore_errors=True)
    shape = {
        "seed": settings.run.seed,
        "hidden": model.hidden_size,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "feed_forward": model.intermediate_size,
        "max_context_tokens": settings.rollout.max_context_tokens,
        "vision": model.vision,
    }
    order = {"directory": str(directory.model), "words": model.words, "shape": shape}
    wanted.write_text(json.dumps(order | {"fake": settings.train.backend == "fake"}))
    child = await processes.spawn(
        "make-model", [sys.executable, "-m", "tide_trainer.backends.make_model", "--settings", str(wanted)]
    )
    try:
        async with asyncio.timeout(_READY_S * 2):
            code = await child.wait_dead()
    except TimeoutError as error:
        raise ProcessFailed(
            f"the tiny model was not made in {_READY_S * 2:g} s; the end of its log:\n{child.tail()}"
        ) from error
    if code:
        raise ProcessFailed(f"the tiny model could not be made; the end of its log:\n{child.tail()}")
    wanted.unlink()
    return directory.model


class _Peers:
    """Channels by the name that each process gives in its hello."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Channel]] = {}

    def connected(self, channel: Channel) -> None:
        """Hands a new channel to who waits for it; an unexpected one is closed."""
        waiting = self._waiting.pop(channel.peer, None)
        if waiting is None or waiting.done():
            _LOG.warning("an unexpected process %r connected; its channel is closed", channel.peer)
            channel.close()
        else:
            waiting.set_result(channel)

    def expect(self, name: str) -> asyncio.Future[Channel]:
        """The channel that a process named `name` will open."""
        return self._waiting.setdefault(name, asyncio.get_running_loop().create_future())


class _Boot:
    """Starts the processes that are neither engines nor Actor ranks."""

    def __init__(
        self,
        settings: TrainerSettings,
        directory: RunDirectory,
        processes: LocalProcesses,
        server: ChannelServer,
        peers: _Peers,
        model: Path,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._processes = processes
        self._server = server
        self._peers = peers
        self._model = model
        self._reporter_token = secrets.token_urlsafe(24)
        self._gateway_url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def gateway(self) -> GatewayClient:
        """The configured gateway, or one of our own over the registry file."""
        wanted = self._settings.gateway
        url = wanted.url
        if not url:
            argv = [
                sys.executable, "-m", "tide_gateway.cli", "serve",
                "--config", wanted.environments,
                "--port", str(wanted.port),
                "--database", self._directory.database_url("gateway"),
                "--log-level", "warning",
                # Nobody comes back to a run's own gateway: its environment servers go with it.
                "--outlive-s", "0",
            ]  # fmt: skip
            child = await self._processes.spawn("gateway", argv, announce=True, ready_timeout_s=wanted.ready_timeout_s)
            url = child.url
        self._gateway_url.set_result(url)
        return GatewayClient(url, token=gateway_token())

    async def router(self) -> RouterPort:
        """The router's process."""
        joined = self._peers.expect("router")
        argv = [sys.executable, "-m", "tide_trainer.router", "--control", str(self._server.path)]
        argv += ["--model-dir", str(self._model), "--image-folder", str(self._directory.images)]
        wanted = self._settings.model
        argv += ["--tool-format", wanted.tool_format, "--reasoning-format", wanted.reasoning_format]
        child = await self._processes.spawn("router", argv, announce=True, ready_timeout_s=_READY_S)
        port = RouterPort(await self._joined("router", joined, child), child.url)
        await port.admit_reporters(self._reporter_token)
        return port

    async def workers(self, name: str, entry: str, num: int) -> WorkerPool:
        """Agent worker processes for one agent."""
        url = await asyncio.shield(self._gateway_url)
        channels: list[Channel] = []
        for index in range(num):
            joined = self._peers.expect(f"{name}-{index}")
            argv = [sys.executable, "-m", "tide_trainer.loop.agent_worker", "--control", str(self._server.path)]
            argv += ["--name", f"{name}-{index}", "--agent", entry, "--gateway", url]
            argv += ["--max-tasks", str(self._settings.agent.max_tasks_per_worker)]
            agent = self._settings.agent
            argv += ["--folder", agent.folder]
            argv += ["--max-images", str(agent.max_images), "--keep-images", str(agent.keep_images)]
            child = await self._processes.spawn(f"{name}-{index}", argv)
            channels.append(await self._joined(f"agent worker {name}-{index}", joined, child))
        return WorkerPool(channels, "policy", self._reporter_token)

    async def _joined(self, name: str, joined: asyncio.Future[Channel], child: ChildProcess) -> Channel:
        """The channel that a process opens, unless it dies or is late."""
        dead = asyncio.ensure_future(child.wait_dead())
        try:
            await asyncio.wait((joined, dead), timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dead.cancel()
        if not joined.done():
            raise ProcessFailed(f"{name} did not connect; the end of its log:\n{child.tail()}")
        return joined.result()
