"""Records chosen trajectories turn by turn: notes while they run, a file when they end. Off the hot path.

    shell: begin -> tapped (router's events), decided (scheduler's decisions) -> end -> a thread writes the file

Waits for nothing; at most `MAX_PENDING` files wait to be written, more are left out with a warning. A trajectory that
cannot be written is left out with a warning too: looking at a run never ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from tide_trainer.images import ImageStore
from tide_trainer.loop.recording import Choice, Recording
from tide_trainer.loop.shell_task import ShellTask
from tide_trainer.report.recorded import EarlierAttempt
from tide_trainer.report.recording_file import RecordingFiles
from tide_trainer.run_directory import RunDirectory
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Decision
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import Trajectory

_LOG = logging.getLogger(__name__)
MAX_PENDING = 64
MAX_REMEMBERED = 1024
"""Tasks whose failed attempts are remembered for the next attempt's file."""
CLOSE_S = 5.0

Handler = Callable[[Mapping[str, Any]], None]


def recorder_of(
    settings: TrainerSettings, directory: RunDirectory, scheduler: TaskScheduler, token_text: Callable[[int], str]
) -> TrajectoryRecorder:
    """The recorder of a run, as its configuration says; `token_text` gives an id's text in its place behind others."""
    report = settings.report
    files = RecordingFiles(
        directory.trajectories,
        ImageStore(directory.images),
        directory.name,
        token_text,
        report.max_mib << 20,
        settings.rollout.max_context_tokens,
    )
    choice = Choice(settings.evaluation.num_samples, report.trajectories_every, report.num_trajectories)
    return TrajectoryRecorder(choice, scheduler, files)


class TrajectoryRecorder:
    """Notes what happens to chosen tasks and has it written.

    A task that was not chosen costs one look into a dictionary for each event.

    Args:
        choice: which tasks.
        scheduler: asked for its predictions and its ranks' usage.
        files: writes the files, in a thread.
        now: the shell's clock.
    """

    def __init__(
        self,
        choice: Choice,
        scheduler: TaskScheduler,
        files: RecordingFiles,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice = choice
        self._scheduler = scheduler
        self._files = files
        self._now = now
        self._open: dict[str, Recording] = {}
        self._earlier: dict[str, tuple[EarlierAttempt, ...]] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        self.num_left_out = 0

    def begin(self, task: ShellTask, temperature: float, version: int) -> None:
        """A task is handed to the scheduler while the ranks serve `version`; recorded from now on if it is chosen."""
        earlier = self._earlier.pop(task.uid, None)
        chosen = self._choice.wants(task.kind, task.member, temperature, version) if task.attempt == 0 else earlier
        if chosen:
            self._open[task.session] = Recording(
                task.uid,
                task.prompt,
                task.kind,
                task.attempt,
                temperature,
                started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                began_s=self._now(),
                earlier=earlier or (),
            )

    def tapped(self, **handlers: Handler) -> dict[str, Handler]:
        """The handlers of the router's events, by name, so that recordings hear the events too."""
        return {name: partial(self._hear, handler, name) for name, handler in handlers.items()}

    def decided(self, decisions: Iterable[Decision], now_s: float) -> None:
        """The scheduler has decided; what concerns a recorded task is noted."""
        if not self._open:
            return
        for decision in decisions:
            recording = self._open.get(decision.task)
            if recording is not None:
                rank = getattr(decision, "rank", None)
                views = self._scheduler.view().ranks if rank is not None else ()
                view = next((view for view in views if view.rank == rank), None)
                recording.decided(decision, now_s, view, self._scheduler.predicted_tokens(decision.task))

    def end(self, session: str, result: asyncio.Future[Trajectory], version: int) -> None:
        """The attempt is over; with a trajectory it is written soon, without one (it was aborted) it is forgotten."""
        recording = self._open.pop(session, None)
        if recording is None or not result.done() or result.cancelled() or result.exception() is not None:
            return
        trajectory, ended_s = result.result(), self._now()
        if trajectory.reward is None and len(self._earlier) < MAX_REMEMBERED:
            error = str(trajectory.metrics.get("error") or "")
            failed = EarlierAttempt(attempt=recording.attempt, outcome=trajectory.outcome, error=error[:2000])
            self._earlier[recording.uid] = (*recording.earlier, failed)
        if len(self._writing) >= MAX_PENDING:
            self._leave_out(recording, f"{MAX_PENDING} others wait to be written")
            return
        duration_s = max(0.0, ended_s - recording.began_s)
        writing = asyncio.create_task(self._write(recording, trajectory, duration_s, version), name="write trajectory")
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)

    async def written_images(self) -> frozenset[str] | None:
        """Digests of the images of all recorded trajectories; None where one is not written within `CLOSE_S`."""
        if self._writing:
            _, late = await asyncio.wait(self._writing, timeout=CLOSE_S)
            if late:
                return None
        return frozenset(self._files.images)

    async def close(self) -> None:
        """Waits at most `CLOSE_S` for what is being written; the rest is left out."""
        if self._writing:
            _, late = await asyncio.wait(self._writing, timeout=CLOSE_S)
            for writing in late:
                writing.cancel()
            if late:
                _LOG.warning("%d recorded trajectories were not written within %g s", len(late), CLOSE_S)

    def _hear(self, handler: Handler, name: str, event: Mapping[str, Any]) -> None:
        recording = self._open.get(event["session"])
        if recording is not None:
            recording.heard(name, event, self._now())
        handler(event)

    async def _write(self, recording: Recording, trajectory: Trajectory, duration_s: float, version: int) -> None:
        notes = {name: getattr(recording, name) for name in ("kind", "attempt", "temperature", "started_at")}
        notes |= {"turns": tuple(recording.turns), "events": tuple(recording.events)}
        notes |= {"earlier_attempts": recording.earlier, "duration_s": duration_s, "end_version": version}
        try:
            async with self._one_at_a_time:
                await asyncio.to_thread(self._files.write, recording.prompt, trajectory, notes, recording.num_left_out)
        except Exception as error:  # noqa: BLE001 - the boundary: it is logged and counted; the run goes on without it
            self._leave_out(recording, f"{type(error).__name__}: {error}")

    def _leave_out(self, recording: Recording, reason: str) -> None:
        self.num_left_out += 1
        _LOG.warning("trajectory %s is not recorded: %s", recording.uid, reason)
