"""The trainer's schema: `tide-train migrate`, and every run at its start."""

from __future__ import annotations

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, OperationalError

from tide_sdk.migrations import DatabaseTooNew, check_revision, migrate
from tide_trainer.errors import ConfigurationError

_DRIVER = "sqlite+aiosqlite"


def migrate_database(url: str) -> list[str]:
    """Brings the database to the newest revision; returns its revisions.

    Raises:
        ConfigurationError: the URL is wrong, the database cannot be opened, or it is from a newer version.
    """
    parsed = _parse(url)
    try:
        return migrate("trainer", parsed.set(drivername=parsed.get_backend_name()))
    except DatabaseTooNew as error:
        raise ConfigurationError("run.database_url", str(error)) from error
    except OperationalError as error:
        raise ConfigurationError("run.database_url", f"cannot be opened: {error.orig}") from error


def check_database(url: str) -> None:
    """Reads the revision without changing anything. Raises ConfigurationError as `migrate_database`."""
    parsed = _parse(url)
    try:
        check_revision("trainer", parsed.set(drivername=parsed.get_backend_name()))
    except DatabaseTooNew as error:
        raise ConfigurationError("run.database_url", str(error)) from error
    except OperationalError as error:
        raise ConfigurationError("run.database_url", f"cannot be opened: {error.orig}") from error


def async_url(url: str) -> str:
    """The same database with the driver of the async engine."""
    return _parse(url).set(drivername=_DRIVER).render_as_string(hide_password=False)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigurationError("run.database_url", f"is no SQLAlchemy URL: {error}") from error
    if parsed.get_backend_name() != "sqlite":
        raise ConfigurationError("run.database_url", "names no sqlite file, for example sqlite:///trainer.sqlite3")
    return parsed
