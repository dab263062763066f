"""The trainer's migrations with rows in the tables: up, down, up again."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect, text

from tide_sdk.migrations import make_config
from tide_trainer.persistence.models import Base


@pytest.fixture
def url(tmp_path: Path):
    return create_engine(f"sqlite:///{tmp_path / 'trainer.sqlite3'}").url


def run(url, *statements: str) -> list:
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            results = [connection.execute(text(statement)) for statement in statements]
            return [tuple(row) for row in results[-1]] if results[-1].returns_rows else []
    finally:
        engine.dispose()


def fill_the_first_tables(url) -> None:
    run(
        url,
        "INSERT INTO runs VALUES ('r', 'running', 3, '{}', 0.5, NULL)",
        "INSERT INTO groups VALUES ('r', 'train/0', 'toy', 7, 'trained', NULL, 1, 2, 'abc')",
        "INSERT INTO groups VALUES ('r', 'train/1', 'toy', 8, 'dropped', 'too few', 1, NULL, NULL)",
        "INSERT INTO trajectories VALUES ('r', 'train/0/0', 'train/0', 'completed', 0.25, 4, 30, 1)",
        "INSERT INTO train_steps VALUES ('r', 3, '{}', 1.5)",
        "INSERT INTO rank_roles VALUES ('r', 'rollout:0', 0, 'rollout')",
    )


def rows(url) -> dict[str, list]:
    names = ("runs", "groups", "trajectories", "train_steps", "rank_roles")
    return {name: run(url, f"SELECT * FROM {name} ORDER BY 1, 2") for name in names}


def test_rows_of_the_first_release_survive_up_down_and_up(url):
    config = make_config("trainer", url)
    command.upgrade(config, "trainer_0001")
    fill_the_first_tables(url)
    before = rows(url)
    command.upgrade(config, "head")
    command.check(config)
    assert run(url, "SELECT sampling FROM groups") == [(0,), (0,)]
    assert run(url, "SELECT task_key, num_resumes FROM runs") == [("", 0)]
    run(
        url,
        "UPDATE groups SET status = 'waiting', reason = 'stuck', sampling = 2 WHERE uid = 'train/1'",
        "INSERT INTO staleness_entries VALUES ('r', 'train/0', 1, 2, 1)",
    )
    command.downgrade(config, "trainer_0001")
    after = rows(url)
    # The release before knows no waiting prompts; it takes them for running ones and accounts for them at its end.
    assert after["groups"].pop(1)[4:6] == ("running", None)
    assert before["groups"].pop(1)
    assert after == before
    command.upgrade(config, "head")
    command.check(config)
    command.downgrade(config, "base")
    assert inspect(create_engine(url)).get_table_names() == ["trainer_alembic_version"]


def test_the_migrations_make_the_models_tables(url):
    command.upgrade(make_config("trainer", url), "head")
    assert set(inspect(create_engine(url)).get_table_names()) == {*Base.metadata.tables, "trainer_alembic_version"}
