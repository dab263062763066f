"""The scheduler's shell: carries out what the pure scheduler decides, and tells it what happened.

    run(prompt) -> submit ...... Admit  -> router.open, worker.run --------------------+
                                 Grant  -> router.grant                                | agent loop
    router `call`  -> on_call    Pause  -> gateway /pause        (call waits)          |
    router `turn`  -> on_turn    Resume -> gateway /resume, then router.grant          v
    `footprint` -> on_report                                                           |
    worker `done`  -> on_end  <- router.close (the captured tokens) <--- Trajectory ---+

Waits for: calls (agent), turns (engine), ends (environment). A call that cannot be granted at once is paused at the
gateway, so that none of its task's clocks runs, and resumed before it is granted; the agent only sees a longer call.
Source: TideRL section 4 and appendix B.1.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

from tide_sdk.client import GatewayClient
from tide_trainer.errors import RunFailed
from tide_trainer.loop.background import BackgroundTasks
from tide_trainer.loop.flight import CallsInFlight, IdleTime
from tide_trainer.loop.gateway_control import GatewayControl
from tide_trainer.loop.ports import RouterPort, WorkerPool
from tide_trainer.loop.rank_versions import RankVersions
from tide_trainer.loop.recorder import TrajectoryRecorder
from tide_trainer.loop.router_events import RouterEvents
from tide_trainer.loop.shell_task import ShellFigures, ShellTask, to_trajectory
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Admit, Decision, Grant, Pause, Refuse, Resume, SchedulerView
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import EngineInfo, Kind, Prompt, RankId, Trajectory

_LOG = logging.getLogger(__name__)


class SchedulerShell:
    """Runs tasks under the scheduler.

    Attributes:
        versions: the model version that each rollout rank serves.
        failed: gets the error that ends the run.

    Args:
        scheduler: the pure scheduler; only this object calls it.
        router: control of the router's process.
        workers: the agent worker processes.
        gateway: for `/pause` and `/resume`.
        settings: the whole configuration.
        run: the run's name, first part of every key at the gateway.
        recorder: notes what happens to chosen tasks.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        scheduler: TaskScheduler,
        router: RouterPort,
        workers: WorkerPool,
        gateway: GatewayClient,
        settings: TrainerSettings,
        run: str,
        recorder: TrajectoryRecorder,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._router = router
        self._workers = workers
        self._control = GatewayControl(gateway)
        self._settings = settings
        self._run = run
        self._now = now
        self._tasks: dict[str, ShellTask] = {}
        self._in_flight = CallsInFlight()
        self.versions = RankVersions(self._tasks)
        self._background = BackgroundTasks(self._fail)
        self._recorder = recorder
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._figures = ShellFigures()
        self._idle = IdleTime(now())
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        events = RouterEvents(
            scheduler,
            router,
            self._tasks,
            self._in_flight,
            self._figures,
            now,
            self._wake,
            self._unpause,
        )
        router.handle(**recorder.tapped(**events.handlers()))
        workers.handle(started=self._on_started)

    async def run(
        self,
        prompt: Prompt,
        group: str,
        member: int,
        attempt: int,
        kind: Kind,
        temperature: float | None = None,
        version: int | None = None,
    ) -> Trajectory:
        """One attempt, see `rollout.TaskRunner`; cancelling aborts it and ends its task on the gateway."""
        uid = f"{group}/{member}"
        session = f"{uid}/{attempt}".replace("/", ".")
        about = (session, uid, group, member, attempt, prompt, kind, temperature)
        task = ShellTask(*about, secrets.token_urlsafe(24), version)
        self._tasks[session] = task
        self._idle.note(False, self._now())
        temperature = task.sampling(self._settings.rollout)["temperature"]
        self._recorder.begin(task, temperature, task.label_version(self.versions.newest))
        self._scheduler.submit(task.entry(self._settings))
        self._wake()
        try:
            trajectory = await task.result
            self._scheduler.on_end(session, self._now(), completed=trajectory.reward is not None)
            return trajectory
        except asyncio.CancelledError:
            self._scheduler.withdraw(session)
            raise
        finally:
            del self._tasks[session]
            self._recorder.end(session, task.result, task.label_version(self.versions.newest))
            self._idle.note(not self._tasks, self._now())
            if task.playing is not None:
                task.playing.cancel()
            self._wake()

    def add_rank(self, info: EngineInfo) -> None:
        """A rollout rank, known to the router already, serves from now on."""
        budget_tokens = self._settings.scheduler.budget_tokens(info.kv_tokens)
        self._scheduler.add_rank(info.rank, budget_tokens, info.block_tokens, info.version)
        self.versions.add(info.rank, info.version)
        self._wake()

    def quarantine(self, rank: RankId, reason: str) -> None:
        """Takes a rank out; its tasks are re-placed at their next call."""
        _LOG.error("rollout rank %s leaves the scheduler: %s", rank, reason)
        self._scheduler.remove_rank(rank)
        self.versions.remove(rank)
        self._background.spawn(self._router.drop_rank(rank))
        self._wake()

    def close_gate(self, ranks: Set[RankId] | None = None) -> None:
        """Grants nothing on `ranks` (None: all) from now on, see `Gate`; calls that arrive there are paused."""
        self.versions.check_closing(self.versions.living() if ranks is None else ranks)
        self._scheduler.close_gate(ranks)
        self._wake()

    async def drained(self, ranks: Set[RankId] | None = None) -> None:
        """Returns when no granted call is in flight on `ranks` (None: on any)."""
        await self._in_flight.drained(ranks)

    def busy_ranks(self) -> frozenset[RankId]:
        """The ranks that have a call in flight."""
        return self._in_flight.ranks()

    def open_gate(self, version: int, ranks: Set[RankId] | None = None) -> None:
        """Grants again on `ranks` (None: all), which serve `version`."""
        self._scheduler.open_gate(version, self.versions.served(version, ranks))
        self._wake()

    def oldest_s(self) -> float | None:
        """Unix time at which the oldest attempt was begun that is not over; None without one."""
        return min((task.began_s for task in self._tasks.values()), default=None)

    def view(self) -> SchedulerView:
        """The scheduler's counters."""
        return self._scheduler.view()

    def figures(self) -> ShellFigures:
        """Sums since the start."""
        view = self._scheduler.view()
        return replace(
            self._figures,
            num_pauses=view.num_pauses,
            num_resumes=view.num_resumes,
            num_failed_controls=self._control.num_failed,
            idle_s=self._idle.total_s(self._now()),
        )

    async def close(self) -> None:
        """Cancels what the shell has in flight; the tasks' own coroutines are their callers' to cancel."""
        self._set_timer(None)
        await self._background.close()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._woken = False
        try:
            now_s = self._now()
            with self._figures.measured():
                decisions = self._scheduler.plan(now_s)
            self._recorder.decided(decisions, now_s)
            for decision in decisions:
                self._carry_out(decision)
            self._set_timer(self._scheduler.next_wake_s())
        except Exception as error:  # noqa: BLE001 - the boundary: the run ends with it
            self._fail(error)

    def _set_timer(self, wake_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.01, wake_s - self._now()), self._wake)

    def _carry_out(self, decision: Decision) -> None:
        task = self._tasks.get(decision.task)
        if task is None:
            return
        _LOG.debug("%s", decision)
        match decision:
            case Admit():
                task.playing = self._background.spawn(self._play(task))
            case Grant():
                self._grant(task, task.call, decision)
            case Pause():
                self._background.spawn(self._control.pause(task))
            case Resume():
                if task.call is not None:
                    # Or a sync would begin between the resume and the grant.
                    self._in_flight.begin(task.call, decision.rank, granted=False)
                self._background.spawn(self._resume(task, task.call, decision))
            case Refuse(reason=reason):
                self._refuse(task, reason)

    def _grant(self, task: ShellTask, call: str | None, grant: Grant | Resume) -> None:
        # A task may have ended, and its call with it, while it was being resumed at the gateway.
        if call is None or task.call != call or self._tasks.get(task.session) is not task:
            return
        task.call, task.rank = None, grant.rank
        self._in_flight.begin(call, grant.rank)
        self._router.grant(call, grant.rank, grant.version, self._scheduler.predicted_tokens(task.session))

    def _refuse(self, task: ShellTask, reason: str) -> None:
        _LOG.warning("task %s is refused: %s", task.session, reason)
        if task.call is not None:
            call, task.call = task.call, None
            # 410: the task is over without a reward, and does not ask again; an overflow would be the model's own.
            code = "session_ended" if self.versions.lost(task.version) else "context_length_exceeded"
            self._router.refuse(call, code, reason)
        elif not task.result.done():
            task.result.set_result(to_trajectory(task, None, {"outcome": "refused", "error": reason}))

    async def _play(self, task: ShellTask) -> None:
        sampling = task.sampling(self._settings.rollout)
        spec = task.spec(self._run, self._settings.agent.task_timeout_s)
        await self._router.open(task.session, task.api_key, sampling, self._settings.rollout.max_context_tokens)
        try:
            done = await self._workers.run(task.session, spec, task.api_key, self._router.url)
        finally:
            captured = await self._router.close(task.session)
        if not task.result.done():
            task.result.set_result(to_trajectory(task, captured, done))

    def _unpause(self, task: ShellTask) -> None:
        self._background.spawn(self._control.resume(task))

    async def _resume(self, task: ShellTask, call: str | None, grant: Resume) -> None:
        await self._control.resume(task)
        self._grant(task, call, grant)

    def _on_started(self, event: Mapping[str, Any]) -> None:
        task = self._tasks.get(event["session"])
        if task is not None and not task.task_id.done():
            task.task_id.set_result(event["task_id"])

    def fail(self, error: RunFailed) -> None:
        """Ends the run: who awaits `failed` gets the error; the first one counts."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        _LOG.error("the scheduler's shell failed", exc_info=error)
        self.fail(RunFailed(f"the scheduler's shell failed: {error!r}"))
