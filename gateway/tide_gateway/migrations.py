"""Runs the migrations from a checkout and from an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, create_engine, pool
from sqlalchemy.engine import URL

SECTION = "gateway"


class DatabaseTooNew(Exception):  # noqa: N818 (says what is the matter)
    """The database was migrated by a newer version of the code than this one."""


def scripts_folder() -> Path:
    """The folder with `env.py`: inside the package of an installed wheel, at the root of a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_alembic", here.parents[1] / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError(f"the migrations are missing beside {here}; install the package again")


def make_config(section: str, url: URL) -> Config:
    """Alembic's configuration of one side, without an ini file.

    Args:
        section: gateway or trainer.
        url: the database, with a synchronous driver.
    """
    folder = scripts_folder()
    config = Config(ini_section=section)
    options = {
        "script_location": str(folder),
        "version_locations": str(folder / "versions" / section),
        "version_table": f"{section}_alembic_version",
        "path_separator": "os",
        "sqlalchemy.url": url.render_as_string(hide_password=False),
    }
    for name, value in options.items():
        config.set_main_option(name, value.replace("%", "%%"))
    return config


def migrate(section: str, url: URL) -> list[str]:
    """Bring the database to the newest revision and return its revisions. Repeating it changes nothing.

    Raises:
        DatabaseTooNew: the database holds a revision that this code does not know.
    """
    config = make_config(section, url)
    script = ScriptDirectory.from_config(config)
    engine = create_engine(url, poolclass=pool.NullPool)
    with engine.begin() as connection:
        _check_known(script, connection, section)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        context = MigrationContext.configure(connection, opts={"version_table": f"{section}_alembic_version"})
        return sorted(context.get_current_heads())


def _check_known(script: ScriptDirectory, connection: Connection, section: str) -> None:
    context = MigrationContext.configure(connection, opts={"version_table": f"{section}_alembic_version"})
    for revision in context.get_current_heads():
        try:
            known = script.get_revision(revision)
        except CommandError:
            known = None
        if known is None:
            raise DatabaseTooNew(
                f"database: it is at revision {revision!r}, which this version does not know; "
                "install the newer version that made it, or name another database"
            )
