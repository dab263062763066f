"""One run from its folder to its report; every end, a failure and Ctrl-C included, leaves whole files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from typing import Any

import tomli_w
from rich.console import Console
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from tide_trainer.errors import ConfigurationError, RunFailed, TrainerError
from tide_trainer.loop.evaluation import Evaluation
from tide_trainer.persistence.migrate import async_url, migrate_database
from tide_trainer.persistence.repository import ENDED_FIRST, RunRepository
from tide_trainer.report.html import write_report
from tide_trainer.report.metrics import MetricsLog, rewind_metrics
from tide_trainer.report.turn_cpu import turn_cpu
from tide_trainer.report.view import LiveView
from tide_trainer.resume import Life, Resumption, resume
from tide_trainer.run_directory import RunDirectory, new_run_directory
from tide_trainer.settings import TrainerSettings
from tide_trainer.usage import Usage
from tide_trainer.wired import Wired
from tide_trainer.wiring import wired

_LOG = logging.getLogger(__name__)
_FORMER_LIFE_S = 20.0
"""How long a run that goes on waits for what is left of its former life to end."""


async def run(settings: TrainerSettings, *, only_warm_start: bool = False, resumed: RunDirectory | None = None) -> int:
    """Runs a checked configuration; returns the exit code.

    Cancelling it ends the run in order within 15 s: tasks are ended, processes stopped, prompts accounted for, the
    report written.

    Args:
        settings: the whole configuration.
        only_warm_start: ends after the warm start.
        resumed: the folder of a run that goes on; None begins a new one.
    """
    directory = resumed or new_run_directory(settings.run)
    with directory.held(_FORMER_LIFE_S if resumed else 0.0) as lock:
        return await _in_folder(settings, directory, lock, only_warm_start=only_warm_start, resumed=resumed is not None)


async def _in_folder(
    settings: TrainerSettings, directory: RunDirectory, lock: int, *, only_warm_start: bool, resumed: bool
) -> int:
    config = plain(settings)
    url = settings.run.database_url or directory.database_url("trainer")
    try:
        log_to(directory)
        if not resumed:
            directory.config.write_text(tomli_w.dumps(config), encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"{directory.path}: cannot be written ({error.strerror}); free or fix the folder") from error
    await asyncio.to_thread(migrate_database, url)
    repository = RunRepository(async_url(url), directory.name, directory.payloads)
    try:
        resumption = None
        if resumed:
            resumption = await resume(settings, directory, repository)
            directory.config.write_text(tomli_w.dumps(config), encoding="utf-8")
        else:
            await _open_run(repository, settings, config)
        life = _Run(settings, directory, repository, config, resumption, lock)
        return await life.play(only_warm_start=only_warm_start)
    finally:
        await repository.close()


async def _open_run(repository: RunRepository, settings: TrainerSettings, config: Mapping[str, Any]) -> None:
    try:
        await repository.open_run(config, time.time())
    except IntegrityError as error:
        fix = f"already holds a run of the name {repository.run!r}; choose another run.name or another database"
        raise ConfigurationError("run.database_url" if settings.run.database_url else "run.name", fix) from error
    except SQLAlchemyError as error:
        raise RunFailed(f"the trainer's database cannot be written: {error}") from error


async def _to_the_end(ending: Coroutine[Any, Any, bool]) -> bool:
    """Awaits the run's end although a signal comes in the middle of it: there is nothing else left to stop."""
    task = asyncio.ensure_future(ending)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    return task.result()


def plain(settings: TrainerSettings) -> dict[str, Any]:
    """The configuration as TOML can hold it."""
    return settings.model_dump(mode="json", exclude_none=True)


class _Run:
    def __init__(
        self,
        settings: TrainerSettings,
        directory: RunDirectory,
        repository: RunRepository,
        config: Mapping[str, Any],
        resumption: Resumption | None,
        lock: int,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._repository = repository
        self._resumption = resumption
        self._lock = lock
        elapsed_s = rewind_metrics(directory.metrics, resumption.version, resumption.number) if resumption else 0.0
        self._log = MetricsLog(directory.metrics, elapsed_s=elapsed_s)
        self._view = LiveView(
            Console(),
            name=directory.name,
            max_train_steps=settings.run.max_train_steps,
            eta=settings.algorithm.eta,
            target=settings.run.target_success,
        )
        self._samples: list[dict[str, Any]] = []
        if resumption is not None and directory.samples.is_file():
            self._samples = json.loads(directory.samples.read_text(encoding="utf-8"))
        self._wired: Wired | None = None
        self._usage: Usage | None = None
        self._started_s = time.monotonic()
        self._record(
            "run", name=directory.name, config=config, started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        )
        if resumption is not None:
            self._record("resume", **resumption.told())

    async def play(self, *, only_warm_start: bool) -> int:
        status, reason, code = "failed", "", 1
        try:
            with self._view:
                reason = await self._body(only_warm_start)
                status, code = "completed", 0
        except asyncio.CancelledError:
            status, reason, code = "stopped", "stopped by a signal", 130
        except TrainerError as error:
            reason = str(error)
            _LOG.error("the run failed: %s", error)
        except Exception as error:  # noqa: BLE001 - the boundary: it is logged, recorded and ends the run
            reason = f"unexpected: {error!r}"
            _LOG.exception("the run failed")
        finally:
            ended_well = await _to_the_end(self._finish(status, reason))
        if not ended_well:
            code = code or 1
        of_turn = turn_cpu(self._log.records)
        if of_turn is not None:
            print(of_turn.told())
        print(f"{status}: {reason}\nreport: {self._directory.path / 'report.html'}")
        return code

    async def _body(self, only_warm_start: bool) -> str:
        life = Life(self._lock, self._resumption)
        async with wired(
            self._settings, self._directory, self._repository, self._record, self._keep_samples, life=life
        ) as parts:
            self._wired = parts
            progress = asyncio.create_task(self._progress(parts))
            try:
                return await parts.run(only_warm_start=only_warm_start)
            finally:
                progress.cancel()
                self._usage = parts.usage()
                self._record("phase", phase="stopping")

    async def _progress(self, parts: Wired) -> None:
        while True:
            self._view.update({"event": "progress", **parts.progress()})
            await asyncio.sleep(0.5)

    async def _finish(self, status: str, reason: str) -> bool:
        """Accounts for every prompt and writes the last record and the report; True if all of it could be written.

        A full disk must not hide why the run ended: each part is tried, and what fails is logged.
        """

        async def account() -> None:
            await self._repository.drop_unfinished(ENDED_FIRST)
            await self._repository.close_run(status, time.time())

        async def last_record() -> None:
            self._record_end(
                status,
                reason,
                account=await self._repository.account(),
                largest_staleness=await self._repository.largest_staleness(),
            )

        async def report() -> None:
            self._log.close()
            self._directory.samples.write_text(json.dumps(self._samples), encoding="utf-8")
            await asyncio.to_thread(write_report, self._directory.path)

        ended_well = True
        for part in (account, last_record, report):
            try:
                await part()
            except (TrainerError, OSError, SQLAlchemyError) as error:
                _LOG.error("the run's end is not whole: %s", error)
                ended_well = False
        return ended_well

    def _record_end(self, status: str, reason: str, *, account: Mapping[str, int], largest_staleness: int) -> None:
        self._record(
            "end",
            status=status,
            reason=reason,
            account=account,
            largest_staleness=largest_staleness,
            eta=self._settings.algorithm.eta,
            parity_max_abs=self._wired.parity_max_abs if self._wired is not None else None,
            parity_tolerance=self._settings.rollout.parity_tolerance,
            wall_s=time.monotonic() - self._started_s,
            cpu_s=self._usage.cpu_s if self._usage else {},
            peak_rss_bytes=self._usage.peak_rss_bytes if self._usage else {},
        )

    def _record(self, event: str, **fields: Any) -> None:
        self._view.update(self._log.write(event, **fields))

    def _keep_samples(self, when: str, evaluation: Evaluation) -> None:
        """Keeps failures and successes for the report's pages, before and after training on the same prompts."""
        if self._wired is None:
            return
        chosen = evaluation.trajectories[: self._settings.evaluation.num_samples]
        for trajectory in chosen:
            tokens = [
                {
                    "text": self._wired.token_text(token),
                    "logprob": logprob if hit else None,
                    "sampled": hit,
                    "version": v,
                }
                for segment in trajectory.segments
                for token, hit, logprob, v in zip(
                    segment.token_ids, segment.sampled, segment.logprobs, segment.versions, strict=True
                )
            ]
            row = asdict(trajectory)
            self._samples.append(
                {"when": when, "seed": self._settings.tasks.eval_seed + trajectory.member, "tokens": tokens}
                | {name: row[name] for name in ("uid", "reward", "outcome", "turns", "messages")}
            )


def log_to(directory: RunDirectory) -> None:
    """Sends the main process's log to the run's folder too."""
    directory.logs.mkdir(exist_ok=True)
    handler = logging.FileHandler(directory.logs / "main.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if not isinstance(h, logging.FileHandler)]:
        old.setLevel(logging.ERROR)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
