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
from collections.abc import Callable, Set
from dataclasses import replace

from tide_sdk.client import GatewayClient
from tide_trainer.errors import RunFailed
from tide_trainer.loop.background import BackgroundTasks
from tide_trainer.loop.beliefs import Beliefs
from tide_trainer.loop.call_answers import CallAnswers
from tide_trainer.loop.episode_clocks import EpisodeClocks
from tide_trainer.loop.flight import CallsInFlight, IdleTime
from tide_trainer.loop.gateway_control import GatewayControl
from tide_trainer.loop.ports import RouterPort, WorkerPool
from tide_trainer.loop.pump import Pump
from tide_trainer.loop.rank_versions import RankVersions
from tide_trainer.loop.recorder import TrajectoryRecorder
from tide_trainer.loop.router_events import RouterEvents
from tide_trainer.loop.shell_task import ShellFigures, ShellTask, to_trajectory
from tide_trainer.loop.task_play import TaskPlay
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Abort, Admit, Decision, Grant, Pause, Phase, Refuse, Resume, SchedulerView
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import EngineInfo, Kind, Prompt, RankId, Trajectory

_LOG = logging.getLogger(__name__)


class SchedulerShell:
    """Runs tasks under the scheduler.

    Attributes:
        versions: the model version that each rollout rank serves.
        failed: gets the error that ends the run.
        beliefs: what should be at the engines now.

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
        self._control = GatewayControl(gateway)
        self._settings, self._now = settings, now
        self._tasks: dict[str, ShellTask] = {}
        self._in_flight = CallsInFlight()
        self.versions = RankVersions(self._tasks)
        self._background = BackgroundTasks(self._fail)
        self._recorder = recorder
        self._pump = Pump(self._plan, now, self._fail)
        self._wake = self._pump.wake
        self._figures = ShellFigures()
        self._idle = IdleTime(now())
        self._clocks = EpisodeClocks(now)
        self.beliefs = Beliefs(now)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events = RouterEvents(
            *(scheduler, router, self._tasks, self._in_flight, self._figures, now),
            *(self._wake, self._unpause, self._clocks, self.beliefs),
        )
        self._answers = CallAnswers(
            *(router, self._tasks, self._in_flight, self._control, self._clocks, self.beliefs, self.versions),
            predicted_tokens=scheduler.predicted_tokens,
            hold=self._events.hold,
        )
        router.handle(**recorder.tapped(**self._events.handlers()))
        self._player = TaskPlay(router, workers, settings, run)

    async def run(
        self,
        prompt: Prompt,
        group: str,
        member: int,
        attempt: int,
        kind: Kind,
        temperature: float | None = None,
        version: int | None = None,
        order_key: int = 0,
    ) -> Trajectory:
        """One attempt, see `rollout.TaskRunner`; cancelling aborts it and ends its task on the gateway."""
        uid = f"{group}/{member}"
        session = f"{uid}/{attempt}".replace("/", ".")
        about = (session, uid, group, member, attempt, prompt, kind, temperature)
        task = ShellTask(*about, secrets.token_urlsafe(24), version, order_key)
        self._tasks[session] = task
        self._idle.note(False, self._now())
        sampled_at = task.sampling(self._settings.rollout)["temperature"]
        self._recorder.begin(task, sampled_at, task.label_version(self.versions.newest))
        self._scheduler.submit(task.entry(self._settings))
        self._clocks.begin(session, group, prompt.environment)
        self._wake()
        completed = False
        try:
            trajectory = await task.result
            completed = trajectory.reward is not None
            self._scheduler.on_end(session, self._now(), completed=completed)
            return trajectory
        except asyncio.CancelledError:
            self._scheduler.withdraw(session)
            raise
        finally:
            del self._tasks[session]
            self._clocks.end(session, completed=completed)
            self.beliefs.released(session)
            self._recorder.end(session, task.result, task.label_version(self.versions.newest))
            self._idle.note(not self._tasks, self._now())
            if task.playing is not None:
                task.playing.cancel()
            self._wake()

    def add_rank(self, info: EngineInfo) -> None:
        """A rollout rank, known to the router already, serves from now on."""
        budget_tokens = self._settings.scheduler.budget_tokens(info.kv_tokens)
        self._scheduler.add_rank(info.rank, budget_tokens, info.block_tokens, info.version, info.kv_tokens)
        self.versions.add(info.rank, info.version)
        self.beliefs.add_rank(info.rank, info.block_tokens)
        self._wake()

    def quarantine(self, rank: RankId, reason: str) -> None:
        """Takes a rank out; its tasks are re-placed at their next call."""
        _LOG.error("rollout rank %s leaves the scheduler: %s", rank, reason)
        self._scheduler.remove_rank(rank)
        self.versions.remove(rank)
        self.beliefs.drop_rank(rank)
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

    def on_engine_usage(self, rank: RankId, used_tokens: int, now_s: float) -> None:
        """The engine's own measurement of the KV tokens that requests held there at `now_s`."""
        with self._figures.measured():
            self._scheduler.on_engine_usage(rank, used_tokens, now_s)
        self._wake()

    def set_environment_capacity(self, environment: str, limit: int | None, reserved_eval: int) -> None:
        """What the gateway can hold of an environment's tasks for this run, of which some are for evaluation only."""
        self._scheduler.set_environment_capacity(environment, limit, reserved_eval)
        self._wake()

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

    def paused_s(self, group: str) -> float:
        """Seconds that the group's live members have been paused, held or queued; see `EpisodeClocks.paused_s`."""
        return self._clocks.paused_s(group)

    def episode_s(self, environment: str) -> float | None:
        """Mean seconds of the environment's completed episodes without their pauses; None before the first."""
        return self._clocks.episode_s(environment)

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
        self._pump.stop()
        await self._background.close()

    def _plan(self) -> float | None:
        now_s = self._now()
        with self._figures.measured():
            decisions = self._scheduler.plan(now_s)
        self._recorder.decided(decisions, now_s)
        for decision in decisions:
            self._carry_out(decision)
        return self._scheduler.next_wake_s()

    def _carry_out(self, decision: Decision) -> None:
        task = self._tasks.get(decision.task)
        if task is None:
            return
        _LOG.debug("%s", decision)
        match decision:
            case Admit():
                self._clocks.go(task.session)
                task.playing = self._background.spawn(self._play(task))
            case Grant():
                self._answers.grant(task, task.call, decision)
            case Pause():
                self.beliefs.released(task.session)
                self._background.spawn(self._control.pause(task))
            case Resume():
                if task.call is not None:
                    # Or a sync would begin between the resume and the grant.
                    self._in_flight.begin(task.call, decision.rank, granted=False)
                self._background.spawn(self._answers.resume(task, task.call, decision))
            case Abort():
                self._answers.abort(task)
            case Refuse(reason=reason):
                self._answers.refuse(task, reason)

    async def _play(self, task: ShellTask) -> None:
        played = await self._player.play(task)
        if task.result.done():
            return
        if played.retry_after_s is None:
            task.result.set_result(to_trajectory(task, played.captured, played.done))
        elif self._scheduler.phase(task.session) is Phase.ADMITTED:
            self._figures.num_requeues += 1
            self._clocks.stand(task.session)
            self._scheduler.requeue(task.session, self._now() + played.retry_after_s)
            self._wake()

    def _unpause(self, task: ShellTask) -> None:
        self._background.spawn(self._control.resume(task))

    def fail(self, error: RunFailed) -> None:
        """Ends the run: who awaits `failed` gets the error; the first one counts."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        _LOG.error("the scheduler's shell failed", exc_info=error)
        self.fail(RunFailed(f"the scheduler's shell failed: {error!r}"))
