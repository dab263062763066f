"""Migrations: up, down, beside the trainer's tables, from the command line, and databases that are too new."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect, text

from tide_gateway import cli
from tide_gateway.database import DatabaseError, FileLock, sqlite_url
from tide_gateway.models import Base
from tide_sdk.migrations import DatabaseTooNew, make_config, migrate

ROOT = Path(__file__).resolve().parents[2]


def tables(url) -> set[str]:
    engine = create_engine(url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


@pytest.fixture
def url(tmp_path, empty_database):
    shutil.copy(empty_database, tmp_path / "gateway.db")
    return sqlite_url(f"sqlite:///{tmp_path / 'gateway.db'}")


def test_the_migrations_make_the_models_tables(url):
    assert tables(url) == {*Base.metadata.tables, "gateway_alembic_version"}
    command.check(make_config("gateway", url))


def test_down_and_up_again(url):
    config = make_config("gateway", url)
    command.downgrade(config, "base")
    assert tables(url) == {"gateway_alembic_version"}
    assert migrate("gateway", url) == migrate("gateway", url)
    assert {*Base.metadata.tables} <= tables(url)


def test_foreign_tables_in_the_same_database_are_left_alone(url):
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE runs (id INTEGER PRIMARY KEY)"))
    engine.dispose()
    command.check(make_config("gateway", url))
    command.downgrade(make_config("gateway", url), "base")
    assert "runs" in tables(url)


def test_a_database_from_a_newer_version_is_refused(url, capsys, tmp_path):
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE gateway_alembic_version SET version_num = 'gateway_9999'"))
    engine.dispose()
    with pytest.raises(DatabaseTooNew, match="install the newer version"):
        migrate("gateway", url)
    assert cli.main(["migrate", "--database", f"sqlite:///{url.database}"]) == 2
    assert "gateway_9999" in capsys.readouterr().err
    config = tmp_path / "environments.toml"
    config.write_text('[environments.x]\nruntime = "fake"\n')
    arguments = ["serve", "--config", str(config), "--port", "0", "--database", f"sqlite:///{url.database}"]
    assert cli.main(arguments) == 2
    assert "gateway_9999" in capsys.readouterr().err


def test_the_command_migrates_a_new_file(tmp_path, capsys):
    arguments = ["migrate", "--database", f"sqlite:///{tmp_path / 'new.db'}"]
    assert cli.main(arguments) == 0
    assert cli.main(arguments) == 0
    assert "gateway_0001" in capsys.readouterr().out


def test_alembic_by_hand_takes_the_side_by_name(tmp_path):
    argv = [sys.executable, "-m", "alembic", "-n", "gateway", "-x", f"url=sqlite:///{tmp_path / 'hand.db'}"]
    for words in (["upgrade", "head"], ["check"], ["downgrade", "base"]):
        run = subprocess.run([*argv, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("text", ["sqlite://", "sqlite:///:memory:", "mysql://x/y", "x", "sqlite:///a.db?mode=ro"])
def test_urls_that_are_not_a_file_are_refused(text):
    with pytest.raises(DatabaseError, match="sqlite:///path"):
        sqlite_url(text)


def test_both_spellings_of_the_driver_are_one_file():
    assert sqlite_url("sqlite+aiosqlite:///a.db") == sqlite_url("sqlite:///a.db")


def test_the_file_lock_is_exclusive_and_free_again(tmp_path):
    first, second = FileLock(tmp_path / "x.lock"), FileLock(tmp_path / "x.lock")
    first.take()
    with pytest.raises(DatabaseError, match="another gateway"):
        second.take()
    first.free()
    first.free()
    second.take()
    second.free()
