"""Fixtures that the tests of the loop share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from shell_parts import RANK, Clock, Gateway, Router, Workers

from tide_trainer.loop.recorder import recorder_of
from tide_trainer.loop.shell import SchedulerShell
from tide_trainer.persistence.migrate import async_url, migrate_database
from tide_trainer.persistence.repository import RunRepository
from tide_trainer.run_directory import RunDirectory
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.settings import FootprintPrior
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import EngineInfo, Prompt


@pytest.fixture
def settings() -> TrainerSettings:
    """A small configuration on the fakes."""
    return TrainerSettings.model_validate(
        {
            "tasks": {"environment": "toy", "num_eval": 4},
            "rollout": {"engine": "fake"},
            "train": {"backend": "fake"},
            "algorithm": {"groups_per_batch": 2, "group_size": 2, "eta": 1},
        }
    )


@pytest.fixture
async def repository(tmp_path: Path):
    """A migrated database with one open run."""
    url = f"sqlite:///{tmp_path / 'trainer.sqlite3'}"
    migrate_database(url)
    found = RunRepository(async_url(url), "run", tmp_path / "payloads")
    await found.open_run({"a": 1}, 0.0)
    yield found
    await found.close()


@pytest.fixture
def prompt() -> Prompt:
    """Any prompt."""
    return Prompt("train/0", "toy", {}, 1, "train")


@pytest.fixture
def world(settings, tmp_path):
    """Builds a shell with what stands around it; see `shell_parts`."""

    def build(kv_tokens=200, failure=None, **scheduler):
        log = []
        prior = FootprintPrior(prompt_tokens=10, final_tokens=20)
        fixed = {"probe": False, "growth_fraction": 0.0, "share_group_prefix": False, "default_prior": prior}
        ctb = settings.scheduler.model_copy(update=fixed | scheduler)
        whole = settings.model_copy(update={"scheduler": ctb})
        router, workers = Router(log), Workers(log)
        scheduler = TaskScheduler(ctb)
        recorder = recorder_of(whole, RunDirectory("run", tmp_path), scheduler, str)
        clock = Clock()
        shell = SchedulerShell(scheduler, router, workers, Gateway(log, failure), whole, "run", recorder, clock)
        shell.add_rank(EngineInfo(RANK, "http://engine", kv_tokens, 1, 100))
        return SimpleNamespace(shell=shell, router=router, workers=workers, log=log, tasks={}, clock=clock)

    return build
