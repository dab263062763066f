"""Migrations: up, down, beside the trainer's tables, from the command line, and databases that are too new."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from fresh_databases import kind_params
from sqlalchemy import MetaData, Table, create_engine, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from tide_gateway import cli
from tide_gateway.database import DatabaseError, FileLock, database_url
from tide_gateway.models import Base
from tide_sdk.migrations import DatabaseTooNew, make_config, migrate

LIMITS = ("start", "idle", "turn", "active", "end")
ROOT = Path(__file__).resolve().parents[2]


def tables(url) -> set[str]:
    engine = create_engine(url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def execute(url, *statements: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def rows_of(url, table: str) -> list[dict]:
    engine = create_engine(url)
    with engine.connect() as connection:
        reflected = Table(table, MetaData(), autoload_with=connection)
        found = connection.execute(select(reflected).order_by(*reflected.primary_key.columns)).mappings().all()
    engine.dispose()
    return [dict(row) for row in found]


@pytest.fixture(params=kind_params())
def kind(request) -> str:
    return request.param


@pytest.fixture
def url(kind, fresh_databases):
    with fresh_databases.fresh(kind) as made:
        yield database_url(made)


@pytest.fixture
def empty_url(kind, fresh_databases):
    with fresh_databases.fresh(kind, migrated=False) as made:
        yield database_url(made)


def test_the_migrations_make_the_models_tables(url):
    assert tables(url) == {*Base.metadata.tables, "gateway_alembic_version"}
    command.check(make_config("gateway", url))


def test_down_and_up_again(url):
    config = make_config("gateway", url)
    command.downgrade(config, "base")
    assert tables(url) == {"gateway_alembic_version"}
    assert migrate("gateway", url) == migrate("gateway", url)
    assert {*Base.metadata.tables} <= tables(url)
    command.check(config)


def test_foreign_tables_in_the_same_database_are_left_alone(url):
    execute(url, "CREATE TABLE runs (id INTEGER PRIMARY KEY)")
    command.check(make_config("gateway", url))
    command.downgrade(make_config("gateway", url), "base")
    assert "runs" in tables(url)


def test_the_trainers_tables_live_in_the_same_database(url):
    alone = tables(url)
    migrate("trainer", url)
    both = tables(url)
    assert alone < both
    command.check(make_config("gateway", url))
    command.check(make_config("trainer", url))
    command.downgrade(make_config("gateway", url), "base")
    assert tables(url) == (both - alone) | {"gateway_alembic_version"}


def fill_the_first_tables(url) -> None:
    """Rows in every table of the first revision, with values that a careless copy would lose."""
    engine = create_engine(url)
    metadata = MetaData()
    with engine.begin() as connection:
        metadata.reflect(connection)
        blob, long = bytes(range(256)), "\u00e4\u4e16" * 50
        clocks = {f"{name}_{part}_s": 0.1 for name in LIMITS for part in ("limit", "consumed")}
        task = clocks | {
            "owner": long, "environment": "e", "attempt": 3, "kind": "train", "created_s": 1_700_000_000.123456,
            "state": "waiting", "turn": 7, "epoch": 2**40, "version": 2**41, "due_s": 1e17, "since_s": 0.25,
            "instance": "i0", "peer_task": "p", "released": 0, "reward": None, "outcome": None, "metrics": blob,
            "detail": long,
        }  # fmt: skip
        values = {
            "tasks": [task | {"task_id": "t0", "key": "k0"}, task | {"task_id": "t1", "key": "k1", "reward": -0.5}],
            "task_starts": [{"task_id": "t0", "request": blob, "answer": None}],
            "turns": [{"task_id": "t0", "turn": 0, "action": blob, "acted_s": 0.1, "answer": None, "answered_s": None}],
            "task_events": [{"id": 5, "task_id": "t0", "at_s": 0.1, "kind": "started", "detail": long}],
            "instances": [
                {"name": "i0", "environment": "e", "runtime": "process", "replica": "r", "state": "ready",
                 "incarnation": "x", "pid": 7, "created_s": 0.1, "detail": ""},
            ],
            "replicas": [
                {"name": "old", "started_s": 1.0, "seen_s": 1_700_000_100.5},
                {"name": "older", "started_s": 0.5, "seen_s": 2.0},
            ],
        }  # fmt: skip
        assert {*values, "gateway_alembic_version"} == {*metadata.tables}
        for name, rows in values.items():
            for row in rows:
                connection.execute(metadata.tables[name].insert(), row)
    engine.dispose()


def test_rows_survive_the_way_up_and_down_and_up(empty_url):
    config = make_config("gateway", empty_url)
    command.upgrade(config, "gateway_0001")
    fill_the_first_tables(empty_url)
    kept = ("task_starts", "turns", "task_events")
    before = {name: rows_of(empty_url, name) for name in ("tasks", *kept)}

    command.upgrade(config, "gateway_0002")
    after = rows_of(empty_url, "tasks")
    new = {"max_pause_s": 1e17, "max_wall_s": 1e17, "wall_since_s": 1_700_000_000.123456, "worker": ""}
    assert after == [row | new for row in before["tasks"]]
    assert all(isinstance(row["max_pause_s"], float) for row in after)
    assert {name: rows_of(empty_url, name) for name in kept} == {name: before[name] for name in kept}
    assert rows_of(empty_url, "instances") == rows_of(empty_url, "replicas") == []
    assert rows_of(empty_url, "deployment") == [{"one": 1, "name": "", "seen_s": 1_700_000_100.5}]

    execute(
        empty_url,
        "INSERT INTO replicas (name, host, pid, ticks, started_s, seen_s) VALUES ('r', 'h', 1, 2, 3.0, 4.0)",
        "INSERT INTO owners (owner, max_tasks, created_s) VALUES ('o', 1, 0.0)",
        "INSERT INTO instances (name, environment, runtime, replica, state, version, slot, capacity, served,"
        " incarnation, place, created_s, detail)"
        " VALUES ('i', 'e', 'docker', 'r', 'ready', 1, 0, 1, 0, '', '', 0.0, '')",
    )
    command.downgrade(config, "gateway_0001")
    assert {name: rows_of(empty_url, name) for name in before} == before
    assert [row["seen_s"] for row in rows_of(empty_url, "replicas")] == [1_700_000_100.5]
    assert rows_of(empty_url, "instances") == []

    assert migrate("gateway", empty_url)
    assert rows_of(empty_url, "tasks")[0]["task_id"] == "t0"
    assert rows_of(empty_url, "deployment")[0]["seen_s"] == 1_700_000_100.5
    command.check(config)


def test_the_tables_count_rows_by_themselves_after_the_way_up(url):
    insert = "INSERT INTO task_events (task_id, at_s, kind, detail) VALUES ('t', 0.0, 'k', '')"
    execute(url, insert, insert)
    assert len({row["id"] for row in rows_of(url, "task_events")}) == 2


def test_a_migration_that_fails_changes_nothing(empty_url, monkeypatch):
    config = make_config("gateway", empty_url)
    command.upgrade(config, "gateway_0001")
    fill_the_first_tables(empty_url)
    # What the second revision makes near its end is there already.
    execute(empty_url, "CREATE INDEX ix_tasks_instance ON task_events (kind)")
    before = tables(empty_url)
    with pytest.raises(SQLAlchemyError, match="ix_tasks_instance"):
        migrate("gateway", empty_url)
    assert tables(empty_url) == before
    assert len(rows_of(empty_url, "instances")) == 1
    execute(empty_url, "DROP INDEX ix_tasks_instance")
    assert migrate("gateway", empty_url)


def test_several_processes_may_migrate_at_once(empty_url):
    url = empty_url.render_as_string(hide_password=False)
    code = "import sys; from sqlalchemy import make_url; from tide_sdk.migrations import migrate\n"
    code += "print(migrate('gateway', make_url(sys.argv[1])), flush=True)"
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", code, url]
    running = [subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    told = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], told
    assert len({out for out, _ in told}) == 1
    command.check(make_config("gateway", empty_url))


def test_a_database_from_a_newer_version_is_refused(url, capsys, tmp_path):
    execute(url, "UPDATE gateway_alembic_version SET version_num = 'gateway_9999'")
    with pytest.raises(DatabaseTooNew, match="install the newer version"):
        migrate("gateway", url)
    if url.get_backend_name() != "sqlite":
        return
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
    assert "gateway_0003" in capsys.readouterr().out


def test_alembic_by_hand_takes_the_side_by_name(empty_url):
    hand = empty_url.set(drivername=empty_url.get_backend_name()).render_as_string(hide_password=False)
    argv = [sys.executable, "-m", "alembic", "-n", "gateway", "-x", f"url={hand}"]
    for words in (["upgrade", "head"], ["check"], ["downgrade", "base"]):
        run = subprocess.run([*argv, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
    assert tables(empty_url) == {"gateway_alembic_version"}


def test_the_file_lock_is_exclusive_and_free_again(tmp_path):
    first, second = FileLock(tmp_path / "x.lock"), FileLock(tmp_path / "x.lock")
    first.take()
    with pytest.raises(DatabaseError, match="another gateway"):
        second.take()
    first.free()
    first.free()
    second.take()
    second.free()
