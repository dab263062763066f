"""A booted run: its objects, and the phases it goes through."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tide_sdk.client import GatewayClient
from tide_trainer.backends.engine_process import EngineProcess
from tide_trainer.cluster.local import ChildProcess, LocalProcesses
from tide_trainer.errors import RunFailed, TrainerError
from tide_trainer.images import ImageStore, ImageTokens
from tide_trainer.loop.engine_watch import EngineWatch
from tide_trainer.loop.environment_watch import environment_watch_of
from tide_trainer.loop.evaluation import Evaluation
from tide_trainer.loop.heartbeats import Heartbeats
from tide_trainer.loop.image_pruning import ImagePruning
from tide_trainer.loop.parity import parity_image
from tide_trainer.loop.ports import RouterPort, WorkerPool
from tide_trainer.loop.progress import progress
from tide_trainer.loop.prompts import PromptSource
from tide_trainer.loop.recorder import recorder_of
from tide_trainer.loop.role_view import role_view
from tide_trainer.loop.rollout import Rollout, TaskRunner
from tide_trainer.loop.shell import SchedulerShell
from tide_trainer.loop.sync import WeightSync
from tide_trainer.loop.train import Parts, TrainLoop
from tide_trainer.loop.warm_start import WarmStart, record_demonstrations
from tide_trainer.model_files import vocab_size
from tide_trainer.persistence.repository import RunRepository
from tide_trainer.protocols import TrainingBackend
from tide_trainer.resume import Resumption
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.supervised import supervised_sequences
from tide_trainer.run_directory import RunDirectory
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.roles import RoleView, plan_roles
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import EngineInfo, RankId
from tide_trainer.usage import Usage, part_of, usage

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
NEEDED = frozenset({"gateway", "router", "agents"})
"""Parts whose processes the run cannot miss and does not start anew."""
DEATH_SEEN_S = 1.0
"""Longest time between a failure and the sight of the process that died of it."""


class Wired:
    """What `wiring.wired` hands out; its parts are up, but for the rollout engines, which `run` awaits."""

    _loop: TrainLoop | None = None
    _death_seen: RunFailed | None = None

    def __init__(
        self,
        settings: TrainerSettings,
        directory: RunDirectory,
        repository: RunRepository,
        record: Callable[..., None],
        keep_samples: Callable[[str, Evaluation], None],
        processes: LocalProcesses,
        model: Path,
        backend: TrainingBackend,
        engines: dict[RankId, EngineProcess],
        engines_up: asyncio.Future[list[EngineInfo]],
        gateway: GatewayClient,
        router: RouterPort,
        workers: WorkerPool,
        demonstrators: WorkerPool,
        resumption: Resumption | None = None,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._repository = repository
        self._record = record
        self._keep_samples = keep_samples
        self._processes = processes
        self._backend = backend
        self._engines = engines
        self._engines_up = engines_up
        self._gateway = gateway
        self._router = router
        self._workers = workers
        self._demonstrators = demonstrators
        self._resumption = resumption
        self._renderer = Renderer(model)
        # A gateway may outlive many runs of one name: their keys must not meet there.
        self._key = f"{directory.name}.{secrets.token_hex(4)}"
        scheduler = TaskScheduler(settings.scheduler)
        self._recorder = recorder_of(settings, directory, scheduler, lambda one: self._renderer.decode_after([one]))
        self._shell = SchedulerShell(scheduler, router, workers, gateway, settings, self._key, self._recorder)
        tokens, seed, store = ImageTokens.read(model), settings.run.seed, ImageStore(directory.images)
        self._placeholder_id = tokens.placeholder_id if tokens else None
        image = parity_image(store, tokens, seed) if tokens else None
        self._sync = WeightSync(
            backend, engines, self._shell, self._quarantine, settings.rollout, vocab_size(model), seed, image
        )
        begun = (0, ()) if resumption is None else (resumption.position, resumption.again)
        source = PromptSource(settings.tasks, begun[0], begun[1])
        self._rollout = Rollout(self._shell, source, repository, settings.algorithm, settings.agent, facts=self._shell)
        oldest_s = (self._shell.oldest_s, self._rollout.oldest_s)
        kept = frozenset({image.digest} if image else ())
        self._pruning = ImagePruning(store, oldest_s, self._recorder.written_images, kept)
        self._heartbeats = Heartbeats(gateway, f"{self._key}/", settings.gateway.heartbeat_timeout_s)
        self._engine_watch = EngineWatch(settings.rollout.watch, self._shell, record)
        self._environment_watch = environment_watch_of(settings, gateway, self._shell)
        self._watching: list[asyncio.Task[None]] = []
        for child in processes.children:
            if part_of(child.name) in NEEDED:
                self._keep_watching(self._watch_child(child), child.name)
        self._keep_watching(self._heartbeats.run(), "heartbeats")

    @property
    def parity_max_abs(self) -> float | None:
        """Largest log-prob difference of the run so far; None before the first sync."""
        return self._sync.parity_max_abs

    async def run(self, *, only_warm_start: bool) -> str:
        """The whole run; returns why it ended. The first part that fails for good ends it."""
        return await self._guarded(self._phases(only_warm_start))

    async def evaluate(self, work: Callable[[TaskRunner], Coroutine[Any, Any, T]]) -> T:
        """Awaits the engines, which hold the model folder's weights, and gives `work` what runs tasks on them."""

        async def on_engines() -> T:
            await self._engines_ready()
            return await work(self._shell)

        return await self._guarded(on_engines())

    async def _guarded(self, phases: Coroutine[Any, Any, T]) -> T:
        work = asyncio.create_task(phases, name="phases")
        try:
            await asyncio.wait((work, self._shell.failed), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.exception() is not None:
                # What failed, a broken channel for example, may be the trace of a death that is about to be seen.
                watching = [task for task in self._watching if not task.done()]
                if watching:
                    await asyncio.wait(watching, timeout=DEATH_SEEN_S, return_when=asyncio.FIRST_COMPLETED)
                if self._death_seen is not None:
                    raise self._death_seen
            if not work.done():
                self._shell.failed.result()
            return await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if self._shell.failed.done():
                self._shell.failed.exception()  # seen, also where another error is told

    async def _phases(self, only_warm_start: bool) -> str:
        gone_on = self._resumption
        # Until the warm start's result was saved as version 0 there is nothing to go on with.
        warm = self._settings.warm_start.enabled and (gone_on is None or gone_on.checkpoint is None)
        if gone_on is not None and gone_on.former_key:
            await self._heartbeats.end_former(f"{gone_on.former_key}/")
        await self._repository.set_task_key(self._key)
        sequences = []
        if warm:
            self._record("phase", phase="recording demonstrations")
            conversations = await record_demonstrations(
                self._demonstrators, self._router.url, self._settings, self._key
            )
            sequences = supervised_sequences(self._renderer, conversations)
            self._record("phase", phase="booting")
        await self._engines_ready()
        if gone_on is not None:
            self._rollout.restore(gone_on.buffers, gone_on.draws, gone_on.groups)
        version = self._rollout.trainer_version
        await self._repository.set_roles(plan_roles(self._role_view()).roles, version)
        if gone_on is not None and gone_on.checkpoint is not None:
            self._record("phase", phase="going on")
            await self._sync.to_version(version)
        if warm:
            self._record("phase", phase="warm start")
            await WarmStart(self._backend, self._sync, self._shell, self._settings, self._record).run(sequences)
            await self._save(0)
        if only_warm_start:
            return "warm start done"
        self._record("phase", phase="training")
        self._loop = TrainLoop(
            Parts(
                self._backend, self._shell, self._rollout, self._sync, self._repository, self._record_with_peaks,
                self._save, self._keep_samples, self._role_view, lambda: self.usage().cpu_s,
                self._placeholder_id, self._pruning.prune,
            ),
            self._settings,
            version=version,
        )  # fmt: skip
        return await self._loop.run()

    def _record_with_peaks(self, event: str, **fields: Any) -> None:
        peaks = self._engine_watch.take_peaks() if event == "train_step" else {}
        self._record(event, **fields, **peaks)

    async def _engines_ready(self) -> None:
        for info in await self._engines_up:
            engine = self._engines[info.rank]
            await self._router.add_rank(info.rank, info.url, engine.token)
            self._shell.add_rank(info)
            self._engine_watch.add_rank(info, engine.token)
            self._keep_watching(self._watch(engine), str(info.rank))
        self._keep_watching(self._engine_watch.run(), "engines")
        self._keep_watching(self._environment_watch.run(), "environments")

    def _keep_watching(self, watch: Coroutine[Any, Any, None], name: str) -> None:
        """Runs a watch beside the run; one that breaks ends the run, for nobody would look any more."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._shell.fail(RunFailed(f"the watch over {name} failed: {error!r}"))

        task = asyncio.create_task(watch, name=f"watch {name}")
        task.add_done_callback(ended)
        self._watching.append(task)

    async def _watch_child(self, child: ChildProcess) -> None:
        """The run fails when a process ends that nothing can replace."""
        code = await child.wait_dead()
        self._death_seen = RunFailed(f"{child.name} ended with exit code {code}; the end of its log:\n{child.tail()}")
        self._shell.fail(self._death_seen)

    async def _watch(self, engine: EngineProcess) -> None:
        """Quarantines a rank at once when its process ends or its probe fails; below `min_ranks` the run fails."""
        self._quarantine(engine.rank, await self._death(engine))

    def _quarantine(self, rank: RankId, reason: str) -> None:
        if self._engines.pop(rank, None) is None:
            return
        self._engine_watch.drop_rank(rank)
        self._shell.quarantine(rank, reason)
        left = len(self._engines)
        if left < self._settings.rollout.min_ranks:
            told = f"rollout rank {rank} is lost: {reason}\n{left} rollout ranks are left, below rollout.min_ranks"
            self._death_seen = RunFailed(told)
            self._shell.fail(self._death_seen)

    async def _death(self, engine: EngineProcess) -> str:
        dead = asyncio.ensure_future(engine.wait_dead())
        try:
            while True:
                await asyncio.wait((dead,), timeout=self._settings.rollout.probe_interval_s)
                if dead.done():
                    return dead.result()
                try:
                    await engine.stats()
                except TrainerError as error:
                    if not dead.done():
                        return f"rollout rank {engine.rank} does not answer its probe: {error}"
        finally:
            dead.cancel()

    async def _save(self, version: int) -> None:
        await self._backend.save(str(self._directory.checkpoint), {"model_version": str(version)})

    def _role_view(self) -> RoleView:
        ranks, buffers = (tuple(self._engines), self._shell.versions.of), self._rollout.buffers()
        batch_size = self._settings.algorithm.groups_per_batch
        return role_view(self._settings.train.num_ranks, self._rollout.trainer_version, *ranks, buffers, batch_size)

    def progress(self) -> dict[str, Any]:
        """What the live view shows between records."""
        size = self._settings.algorithm.groups_per_batch
        return progress(self._rollout.buffers(), size, self._shell.view(), self._engine_watch)

    def usage(self) -> Usage:
        """CPU seconds and peak memory by part since the start; reads /proc, so call it off the event loop."""
        return usage(self._processes)

    def token_text(self, token_id: int) -> str:
        """A token as people read it."""
        return self._renderer.token_text(token_id)

    async def close(self) -> None:
        """Cancels what runs here; the processes are `wiring`'s to end."""
        ending: list[asyncio.Future[Any]] = [*self._watching, self._engines_up]
        for one in ending:
            one.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            if self._loop is not None:
                await self._loop.close()
        await self._rollout.close()
        await self._shell.close()
        await self._recorder.close()
        await self._heartbeats.withdraw()
