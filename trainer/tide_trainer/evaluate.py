"""The evaluation of a checkpoint on our own engines, without Actor ranks.

    checkpoint folder -> engines -+
    held-out seeds -> scheduler --+-> agent workers, gateway -> results.jsonl -> summary.json, report.html

The parts are those of a run, and the files those of `tide-env eval`: one folder for each way of sampling.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from tide_sdk.evaluation.carry_out import carry_out
from tide_sdk.evaluation.folder import EvaluationFailed, EvaluationFolder, FolderRefused
from tide_sdk.evaluation.records import Play, Record, record_of
from tide_sdk.evaluation.report import finish, told
from tide_sdk.evaluation.tasks import EvaluationTask, digest
from tide_sdk.many import Progress
from tide_sdk.outcomes import OutcomeName, TaskResult
from tide_trainer.backends import whole_files
from tide_trainer.errors import ConfigurationError, RunFailed
from tide_trainer.loop.prompts import held_out
from tide_trainer.loop.rollout import TaskRunner, with_attempts
from tide_trainer.persistence.migrate import async_url, migrate_database
from tide_trainer.persistence.repository import RunRepository
from tide_trainer.run import log_to
from tide_trainer.run_directory import new_run_directory
from tide_trainer.settings import RunSettings, TrainerSettings, WarmStartSettings
from tide_trainer.types import Prompt, Trajectory
from tide_trainer.wiring import wired

TEMPERATURES: Mapping[str, float] = {"sampled": 1.0, "greedy": 0.0}
"""The ways to sample, as a run's own evaluations do."""
EXIT_INCOMPLETE = 1


@dataclass(frozen=True, slots=True)
class Order:
    """What is evaluated.

    Attributes:
        checkpoint: a model folder, for example a run's checkpoint.
        ways: of `TEMPERATURES`.
        repeats: plays of each seed where it is sampled; greedy ones would all be the same.
        threshold: a play succeeded if its reward is above it.
        out: the folder; each way has one in it. None: a new one beside the runs.
        resume: go on with what is there.
    """

    checkpoint: Path
    ways: Sequence[str]
    repeats: int = 1
    threshold: float = 0.0
    out: Path | None = None
    resume: bool = False


def settings_for(settings: TrainerSettings, checkpoint: Path) -> TrainerSettings:
    """The configuration with the checkpoint's weights and without a warm start.

    Raises:
        ConfigurationError: the folder holds no model.
    """
    try:
        folder = whole_files.existing(str(checkpoint))
    except ConfigurationError as error:
        unread = isinstance(error.__cause__, OSError)
        fix = error.fix if unread else f"{checkpoint} holds no model (no config.json)"
        fix += "; name a folder such as runs/NAME/checkpoint"
        raise ConfigurationError("--checkpoint", fix) from error
    model = settings.model.model_copy(update={"path": str(Path(folder).absolute())})
    return settings.model_copy(update={"model": model, "warm_start": WarmStartSettings()})


async def evaluate(settings: TrainerSettings, order: Order) -> int:
    """Evaluates a checkpoint; returns the exit code: 0, or 1 if some plays have no reward.

    Cancelling it ends tasks and processes in order within 15 s; what was played is kept and reported.

    Args:
        settings: as `settings_for` gives it, and checked.
        order: what is evaluated.

    Raises:
        ConfigurationError: the folder is not one for this evaluation.
        RunFailed: a part that it cannot miss failed, or the files cannot be written.
    """
    out = order.out
    if out is None:
        out = new_run_directory(settings.run.model_copy(update={"name": f"{settings.run.name}-eval"})).path
    done: list[str] = []
    try:
        with contextlib.ExitStack() as stack:
            folders = {
                way: stack.enter_context(
                    EvaluationFolder(out / way, _definition(settings, order, way), resume=order.resume)
                )
                for way in order.ways
            }
            # Last in, first out: the reports are written while the folders are still held.
            stack.callback(_finish, folders, done)
            await _on_engines(settings, order, folders, out)
    except FolderRefused as error:
        raise ConfigurationError("--out", str(error)) from error
    except EvaluationFailed as error:
        raise RunFailed(str(error)) from error
    return 0 if done == list(order.ways) else EXIT_INCOMPLETE


def _finish(folders: Mapping[str, EvaluationFolder], done: list[str]) -> None:
    for way, folder in folders.items():
        if folder.forget_if_unused():
            continue
        summary = finish(folder.path)
        print(f"{way}: {told(summary, folder.path)}")
        if summary.complete:
            done.append(way)


async def _on_engines(
    settings: TrainerSettings, order: Order, folders: Mapping[str, EvaluationFolder], out: Path
) -> None:
    """Boots the parts in a folder of this session, and plays on them what is missing."""
    prompts = held_out(settings.tasks)
    plays = {way: _plays(prompts, order.repeats if TEMPERATURES[way] else 1) for way in order.ways}
    if not any(folder.missing(plays[way]) for way, folder in folders.items()):
        return
    directory = new_run_directory(RunSettings(name="session", directory=str(out / "sessions")))
    url = directory.database_url("trainer")
    try:
        log_to(directory)
        await asyncio.to_thread(migrate_database, url)
    except (OSError, SQLAlchemyError) as error:
        raise RunFailed(f"{directory.path}: cannot be written ({error}); free or fix the folder") from error
    repository = RunRepository(async_url(url), directory.name, directory.payloads)

    async def work(runner: TaskRunner) -> None:
        for way, folder in folders.items():
            await _play(settings, runner, folder, plays[way], {prompt.uid: prompt for prompt in prompts}, way)

    try:
        async with wired(settings, directory, repository, _phase, lambda *_: None, trains=False) as parts:
            await parts.evaluate(work)
    finally:
        await repository.close()


async def _play(
    settings: TrainerSettings,
    runner: TaskRunner,
    folder: EvaluationFolder,
    plays: Sequence[Play],
    prompts: Mapping[str, Prompt],
    way: str,
) -> None:
    members = {uid: member for member, uid in enumerate(prompts)}

    async def one(play: Play) -> Record:
        began_s, num = time.monotonic(), 0

        async def attempt(number: int) -> Trajectory:
            nonlocal num
            num = number + 1
            group, prompt = f"eval/{way}/{play.repeat}", prompts[play.task.id]
            return await runner.run(prompt, group, members[play.task.id], number, "eval", temperature=TEMPERATURES[way])

        trajectory = await with_attempts(attempt, settings.agent.max_attempts)
        wall_s = time.monotonic() - began_s
        return record_of(play, _result(trajectory), attempts=num, wall_s=wall_s, messages=trajectory.messages)

    concurrency = settings.agent.num_workers * settings.agent.max_tasks_per_worker
    done = len(plays) - len(folder.missing(plays))
    progress = Progress(len(plays), sys.stderr, num_done=done)
    stopped = await carry_out(folder, plays, one, concurrency=concurrency, progress=progress)
    if stopped is not None:
        raise RunFailed(f"the evaluation stopped early: {stopped}")


def _plays(prompts: Sequence[Prompt], repeats: int) -> list[Play]:
    tasks = _tasks(prompts)
    return [Play(task, repeat) for repeat in range(repeats) for task in tasks]


def _tasks(prompts: Sequence[Prompt]) -> list[EvaluationTask]:
    return [EvaluationTask(prompt.uid, prompt.task, prompt.seed, prompt.split) for prompt in prompts]


def _result(trajectory: Trajectory) -> TaskResult:
    metrics = dict(trajectory.metrics)
    error = metrics.pop("error", None)
    outcome: OutcomeName = "context_overflow" if trajectory.outcome == "refused" else trajectory.outcome  # type: ignore[assignment]
    return TaskResult(
        None, outcome, trajectory.reward, trajectory.turns, metrics, None if error is None else str(error)
    )


def _definition(settings: TrainerSettings, order: Order, way: str) -> dict[str, Any]:
    """Everything that decides what the results mean."""
    tasks = _tasks(held_out(settings.tasks))
    rollout = settings.rollout
    folder = Path(settings.model.path)
    place = whole_files.saved_place(str(folder)) or {}
    return {
        "environment": settings.tasks.environment,
        "gateway": settings.gateway.url,
        "agent": settings.agent.entry,
        "model": str(order.checkpoint),
        "model_version": place.get("version"),
        "model_files": _files(folder),
        "sampling": {"temperature": TEMPERATURES[way], "max_new_tokens": rollout.max_new_tokens},
        "engine": rollout.engine,
        "max_context_tokens": rollout.max_context_tokens,
        "seed": settings.run.seed,
        "tasks": {"num": len(tasks), "sha256": digest(tasks)},
        "repeats": order.repeats if TEMPERATURES[way] else 1,
        "threshold": order.threshold,
        "task_timeout_s": settings.agent.task_timeout_s,
    }


def _files(folder: Path) -> str:
    """Which files these are, by name, size and time: a run that goes on writes others to the same place."""
    whole = hashlib.sha256()
    try:
        for file in sorted(folder.iterdir()):
            found = file.stat()
            whole.update(f"{file.name}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    except OSError as error:
        raise ConfigurationError("--checkpoint", f"{error.filename}: {error.strerror}; mend or remove it") from error
    return whole.hexdigest()


def _phase(event: str, **fields: Any) -> None:
    """Tells the phases of the boot, which takes a while, to who watches."""
    if event == "phase" and sys.stderr.isatty():
        print(f"tide-train: {fields['phase']}", file=sys.stderr)
