"""Runs the migrations of the gateway's or the trainer's tables, from a checkout and from an installed wheel alike.

Both sides import this, and neither the other's models. It needs the extra `gateway` or `train` (SQLAlchemy, Alembic).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, create_engine, pool
from sqlalchemy.engine import URL

Side = Literal["gateway", "trainer"]


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


def migrate(side: Side, url: URL) -> list[str]:
    """Brings the database to the newest revision and returns its revisions. Repeating it changes nothing.

    Raises:
        DatabaseTooNew: the database holds a revision that this code does not know.
    """
    config = make_config(side, url)
    with create_engine(url, poolclass=pool.NullPool).begin() as connection:
        _known_heads(config, connection, side)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        return _known_heads(config, connection, side)


def check_revision(side: Side, url: URL) -> list[str]:
    """The database's revisions, none for a fresh one; changes nothing. Raises DatabaseTooNew as `migrate`."""
    with create_engine(url, poolclass=pool.NullPool).connect() as connection:
        return _known_heads(make_config(side, url), connection, side)


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
