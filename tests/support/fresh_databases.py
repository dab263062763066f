"""Migrated, empty databases of both kinds for tests, each a quick copy of a template."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from sqlalchemy.engine import make_url

from tide_gateway.models import Base
from tide_sdk.migrations import migrate

KINDS = ("sqlite", "postgres")
TEMPLATE = "template_gateway"


def kind_params() -> list:
    """Parameters of a fixture that runs a test on both kinds; `postgres` is skipped where no server is installed."""
    return [pytest.param(kind, marks=[pytest.mark.postgres] if kind == "postgres" else []) for kind in KINDS]


class FreshDatabases:
    """Makes databases; the PostgreSQL server starts with the first one that needs it.

    Args:
        folder: for the SQLite files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_files = 0
        self._server: PostgresServer | None = None
        self._template: Path | None = None
        self._emptied: list[str] = []

    @property
    def server(self) -> PostgresServer:
        """The session's server, running."""
        if self._server is None:
            server = PostgresServer()
            try:
                server.start()
                server.execute(f"CREATE DATABASE {TEMPLATE}")
                migrate("gateway", make_url(server.url(TEMPLATE)))
            except BaseException:
                server.close()
                raise
            self._server = server
        self._server.start()
        return self._server

    @contextlib.contextmanager
    def fresh(self, kind: str, *, migrated: bool = True, reuse: bool = False) -> Iterator[str]:
        """The URL of a new database of that kind, removed at the end.

        Args:
            kind: one of `KINDS`.
            migrated: False for one without tables.
            reuse: take one that was emptied, which is quicker; for tests that leave the tables' form alone.
        """
        if kind == "postgres" and reuse:
            server = self.server
            url = self._emptied.pop() if self._emptied else server.create_database(TEMPLATE)
            yield url
            server.empty_database(url, Base.metadata.tables)
            self._emptied.append(url)
            return
        if kind == "postgres":
            url = self.server.create_database(TEMPLATE if migrated else None)
            try:
                yield url
            finally:
                self.server.drop_database(url)
            return
        folder = self._folder / f"sqlite-{self._num_files}"
        self._num_files += 1
        folder.mkdir()
        if migrated:
            shutil.copy(self._sqlite_template(), folder / "gateway.db")
        try:
            yield f"sqlite:///{folder / 'gateway.db'}"
        finally:
            shutil.rmtree(folder)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.close()

    def _sqlite_template(self) -> Path:
        if self._template is None:
            path = self._folder / "template.db"
            migrate("gateway", make_url(f"sqlite:///{path}"))
            self._template = path
        return self._template
