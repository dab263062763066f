"""Statements that are compiled once and handed to the driver as they are.

The way through SQLAlchemy costs several times what the database does for a few rows: a statement is built, its parts
are hashed to find its text, and rows are wrapped. What runs with every turn or start goes this way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sqlalchemy import CompoundSelect, Connection, Dialect, Insert, Select, Update
from sqlalchemy.exc import DBAPIError

Values = Mapping[str, Any]
_Form = tuple[str, Callable[[Values], list[Any]]]


class Statement:
    """One statement, and how each driver takes it.

    Args:
        statement: with a `bindparam` for each value that is given later, and no list of values for IN.
        once: an insert leaves out rows that are there already.
    """

    def __init__(
        self,
        statement: Insert | Update | Select[*tuple[Any, ...]] | CompoundSelect[*tuple[Any, ...]],
        *,
        once: bool = False,
    ) -> None:
        self._statement = statement
        self._suffix = " ON CONFLICT DO NOTHING" if once else ""
        self._forms: dict[str, _Form] = {}
        self._columns: list[str] = list(statement.selected_columns.keys()) if isinstance(statement, Select) else []

    def rows(self, connection: Connection, **values: Any) -> list[tuple[Any, ...]]:
        """All rows that a select finds.

        Raises:
            DBAPIError: as SQLAlchemy raises it.
        """
        text, in_order = self.form(connection.dialect)
        with driver_of(connection) as driver:
            return driver.execute(text, in_order(values)).fetchall()

    def ask(self, connection: Connection, **values: Any) -> Any:
        """A cursor on what a select finds; inside `pipelined` its rows are there only afterwards."""
        text, in_order = self.form(connection.dialect)
        return connection.connection.driver_connection.execute(text, in_order(values))  # type: ignore[union-attr]

    def named(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """A row of a select by its columns' names."""
        return dict(zip(self._columns, row, strict=True))

    def count(self, connection: Connection, **values: Any) -> int:
        """The number of rows that an insert or update changes; raises as `rows`."""
        text, in_order = self.form(connection.dialect)
        with driver_of(connection) as driver:
            return driver.execute(text, in_order(values)).rowcount

    def form(self, dialect: Dialect) -> _Form:
        """The text with places for the values, and what brings the values into their order."""
        form = self._forms.get(dialect.name)
        if form is None:
            style = "format" if dialect.paramstyle == "pyformat" else dialect.paramstyle
            compiled: Any = self._statement.compile(dialect=type(dialect)(paramstyle=style))  # type: ignore[call-arg]
            names: list[str] = compiled.positiontup
            fixed = {name: value for name, value in compiled.params.items() if value is not None}

            def in_order(values: Values) -> list[Any]:
                return [values[name] if name in values else fixed[name] for name in names]

            form = self._forms[dialect.name] = f"{compiled}{self._suffix}", in_order
        return form


Batch = Sequence[tuple[Statement, Sequence[Values]]]


def write_rows(connection: Connection, batch: Batch) -> list[int]:
    """Carry out inserts and updates in order, each for all its rows.

    On PostgreSQL they are one round trip, the transaction's begin included.

    Returns:
        For each statement the number of rows that it changed.

    Raises:
        DBAPIError: as SQLAlchemy raises it.
    """
    cursors: list[Any] = []
    with driver_of(connection) as driver:
        with pipelined(connection):
            for statement, rows in batch:
                text, in_order = statement.form(connection.dialect)
                cursor = driver.cursor()
                cursor.executemany(text, map(in_order, rows))
                cursors.append(cursor)
        return [cursor.rowcount for cursor in cursors]


def pipelined(connection: Connection) -> AbstractContextManager[Any]:
    """What is asked inside goes to PostgreSQL in one round trip, the transaction's begin included."""
    driver: Any = connection.connection.driver_connection
    return driver.pipeline() if connection.dialect.name == "postgresql" else nullcontext()


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
