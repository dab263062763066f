"""Fixtures that the tests of the loop share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tide_trainer.persistence.migrate import async_url, migrate_database
from tide_trainer.persistence.repository import RunRepository
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import Prompt


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
