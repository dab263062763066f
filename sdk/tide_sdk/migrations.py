"""Runs the migrations of the gateway's or the trainer's tables, from a checkout and from an installed wheel alike.

Both sides import this, and neither the other's models. It needs the extra `gateway` or `train` (SQLAlchemy, Alembic).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, pool, text
from sqlalchemy.engine import URL

Side = Literal["gateway", "trainer"]

CONNECT_TIMEOUT_S = 10
LOCK_TIMEOUT_S = 60  # for another migration, and for each table that somebody uses


class DatabaseTooNew(Exception):
    """The database was migrated by a newer version of the code than this one."""


def scripts_folder() -> Path:
    """The folder with `env.py`: inside the package of an installed wheel, at the root of a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_alembic", here.parents[1] / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError(f"the migrations are missing beside {here}; install the package again")


def make_config(side: Side, url: URL) -> Config:
    """Alembic's configuration of one side, without an ini file.

    Args:
        side: whose tables.
        url: the database, with a synchronous driver.
    """
    folder = scripts_folder()
    config = Config(ini_section=side)
    options = {
        "script_location": str(folder),
        "version_locations": str(folder / "versions" / side),
        "version_table": _version_table(side),
        "path_separator": "os",
        "sqlalchemy.url": url.render_as_string(hide_password=False),
    }
    for name, value in options.items():
        config.set_main_option(name, value.replace("%", "%%"))
    return config


@contextmanager
def only_migration(url: URL) -> Generator[Connection, None, None]:
    """A connection in one transaction, committed at the end, during which nobody else migrates this database.

    A migration that fails, or is killed, changes nothing: both databases take table changes back.

    Args:
        url: the database, with a synchronous driver; `postgresql://` means psycopg.

    Raises:
        OperationalError: the database is away, or somebody else kept a lock longer than `LOCK_TIMEOUT_S`.
    """
    engine = _make_engine(url, begin="BEGIN IMMEDIATE")
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
            # Whoever waited here must see the other's tables: each statement has a snapshot of its own.
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended('tide.migrations', 0))"))
        yield connection


def migrate(side: Side, url: URL) -> list[str]:
    """Brings the database to the newest revision and returns its revisions. Repeating it changes nothing.

    Several processes may do it at once: one migrates, the others wait and find nothing left to do.

    Raises:
        DatabaseTooNew: the database holds a revision that this code does not know.
    """
    config = make_config(side, url)
    with only_migration(url) as connection:
        _known_heads(config, connection, side)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        return _known_heads(config, connection, side)


def check_revision(side: Side, url: URL) -> list[str]:
    """The database's revisions, none for a fresh one; changes nothing. Raises DatabaseTooNew as `migrate`."""
    with _make_engine(url, begin="BEGIN").connect() as connection:
        return _known_heads(make_config(side, url), connection, side)


def _make_engine(url: URL, *, begin: str) -> Engine:
    """An engine without a pool; `begin` is how SQLite begins."""
    if url.get_backend_name() == "postgresql":
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        timeout = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_TIMEOUT_S}
        return create_engine(
            url, poolclass=pool.NullPool, isolation_level="READ COMMITTED", hide_parameters=True, connect_args=timeout
        )
    # The gateway's own option of a file, unknown to the driver; it says how tasks are committed, not tables.
    url = url.difference_update_query(["synchronous"])
    engine = create_engine(url, poolclass=pool.NullPool, connect_args={"timeout": float(LOCK_TIMEOUT_S)})

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        # None: left alone, the driver begins no transaction before it changes tables.
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.exec_driver_sql(begin)

    return engine


def _version_table(side: Side) -> str:
    return f"{side}_alembic_version"


def _known_heads(config: Config, connection: Connection, side: Side) -> list[str]:
    context = MigrationContext.configure(connection, opts={"version_table": _version_table(side)})
    script = ScriptDirectory.from_config(config)
    heads = sorted(context.get_current_heads())
    for revision in heads:
        try:
            known = script.get_revision(revision)
        except CommandError:
            known = None
        if known is None:
            raise DatabaseTooNew(
                f"it is at revision {revision!r}, which this version does not know; "
                "install the newer version that made it, or name another database"
            )
    return heads
