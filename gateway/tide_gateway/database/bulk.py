"""Statements for many rows at once, handed to the driver as they are.

The way through SQLAlchemy costs several times what the database does for a small group: here each statement is compiled
once, and a row is a plain tuple. On PostgreSQL the statements of a batch travel together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect, Insert, Update
from sqlalchemy.exc import DBAPIError


class RowStatement:
    """One statement, and how each driver takes it.

    Args:
        statement: an insert or update with a `bindparam` for each value, two or more.
        once: leave out rows that are there already.
    """

    def __init__(self, statement: Insert | Update, *, once: bool = False) -> None:
        self._statement = statement
        self._suffix = " ON CONFLICT DO NOTHING" if once else ""
        self._forms: dict[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {}

    def form(self, dialect: Dialect) -> tuple[str, Callable[[Mapping[str, Any]], Any]]:
        """The text with places for the values, and what brings a row's values into their order."""
        form = self._forms.get(dialect.name)
        if form is None:
            style = "format" if dialect.paramstyle == "pyformat" else dialect.paramstyle
            compiled: Any = self._statement.compile(dialect=type(dialect)(paramstyle=style))  # type: ignore[call-arg]
            form = self._forms[dialect.name] = f"{compiled}{self._suffix}", itemgetter(*compiled.positiontup)
        return form


Batch = Sequence[tuple[RowStatement, Sequence[Mapping[str, Any]]]]


def write_rows(connection: Connection, batch: Batch) -> list[int]:
    """Carry out statements in order, each for all its rows, in the connection's transaction.

    On PostgreSQL they are one round trip, the transaction's begin included.

    Returns:
        For each statement the number of rows that it changed.

    Raises:
        DBAPIError: as SQLAlchemy raises it.
    """
    cursors: list[Any] = []
    with driver_of(connection) as driver:
        with driver.pipeline() if connection.dialect.name == "postgresql" else nullcontext():
            for statement, rows in batch:
                text, values_of = statement.form(connection.dialect)
                cursor = driver.cursor()
                cursor.executemany(text, map(values_of, rows))
                cursors.append(cursor)
        return [cursor.rowcount for cursor in cursors]


@contextmanager
def driver_of(connection: Connection) -> Generator[Any, None, None]:
    """The driver's own connection; what it raises becomes what SQLAlchemy would have made of it."""
    dialect, driver = connection.dialect, connection.connection.driver_connection
    known: Any = dialect.loaded_dbapi.Error
    try:
        yield driver
    except known as error:
        lost = dialect.is_disconnect(error, driver, None)  # type: ignore[arg-type]
        if lost:
            connection.invalidate(error)
        raise DBAPIError.instance(
            None, None, error, known, hide_parameters=True, connection_invalidated=lost, dialect=dialect
        ) from error
