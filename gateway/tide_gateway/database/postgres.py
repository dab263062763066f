"""PostgreSQL: several gateways on one database, through psycopg. Optional: the extra `postgres`.

Every wait has an end: the server ends statements, waits for locks and forgotten transactions; the kernel ends silent
connections; and a whole call that is overdue loses its socket (`wire`), which also covers a server that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from tide_gateway.database.backend import Backend, Verdict, Wire
from tide_gateway.database.errors import DatabaseError
from tide_gateway.database.statements import driver_of

# hashtextextended's seed: other programs' advisory locks in the same database are other numbers.
LOCK_SEED = 0x71DE
_LOCK = f"SELECT pg_advisory_xact_lock(hashtextextended(%s, {LOCK_SEED}))"
_CLOCK = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)")
# Serialization failure, deadlock; a statement on a server that became a standby.
_AGAIN = frozenset({"40001", "40P01", "25006"})
# Error classes with which a COMMIT certainly did not commit: data, constraint, state, rollback, syntax, resources.
_ROLLED_BACK = frozenset({"22", "23", "25", "40", "42", "53", "54"})


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long PostgreSQL may keep us waiting, in seconds.

    Attributes:
        connect_s: for a new connection; at least 2, in whole seconds.
        lock_s: for one lock.
        statement_s: for one statement.
        idle_s: for the next statement of an open transaction, after which the server rolls back.
        total_s: for a whole call, with waiting for a thread and all attempts.
    """

    connect_s: int = 5
    lock_s: float = 5.0
    statement_s: float = 10.0
    idle_s: float = 15.0
    total_s: float = 30.0


def check_postgres(url: URL) -> URL:
    """The URL of a PostgreSQL database, with the driver that we use.

    Raises:
        DatabaseError: another driver, no database, an unknown option, or psycopg is missing. No message holds the
            password.
    """
    if url.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise DatabaseError("database: write postgresql://user@host/name; the driver is psycopg, whatever the URL says")
    if not url.database:
        raise DatabaseError("database: name the database, postgresql://user@host/name")
    try:
        import psycopg
        from psycopg.conninfo import make_conninfo
    except ImportError as error:
        raise DatabaseError(
            f"database: PostgreSQL needs psycopg ({error}); install it with: pip install 'tiderl[postgres]'"
        ) from error
    try:
        make_conninfo(**{name: value for name, value in url.query.items() if isinstance(value, str)})
    except psycopg.ProgrammingError as error:
        raise DatabaseError(f"database: {str(error).strip()}; options of the URL are libpq's") from error
    return url.set(drivername="postgresql+psycopg")


class PostgreSQL(Backend):
    """Many processes write at once; rows guard themselves by their versions, the rest by `lock`.

    Args:
        url: as `check_postgres` gives it.
        num_connections: threads that write and threads that read, each with a connection.
        timeouts: the ends of all waits.
    """

    shared = True
    durable = True  # unless its operator says otherwise

    def __init__(self, url: URL, *, num_connections: int = 4, timeouts: Timeouts | None = None) -> None:
        self._url = url
        self._timeouts = timeouts or Timeouts()
        self.num_writers = self.num_readers = num_connections
        self.deadline_s = self._timeouts.total_s

    def make_engine(self, *, reads: bool) -> Engine:
        """An engine whose transactions are READ COMMITTED, or REPEATABLE READ READ ONLY for reads.

        A writer must see what others committed before it got a row's or a name's lock, so READ COMMITTED; a read of
        several statements must see one state, and can then neither fail nor write.
        """
        engine = create_engine(
            self._url,
            connect_args=self._connect_args(),
            pool_size=self.num_readers if reads else self.num_writers,
            max_overflow=0,
            use_native_hstore=False,  # saves a query at connect
            query_cache_size=256,
            hide_parameters=True,  # bodies do not belong in logs
        )

        @event.listens_for(engine, "connect")
        def _prepare(connection: Any, record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
            from psycopg import IsolationLevel

            # A single read needs no transaction, which would be two more round trips; `_begin` begins the others.
            connection.autocommit = reads
            connection.isolation_level = IsolationLevel.READ_COMMITTED
            record.info["wire"] = Wire(connection.fileno())

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
            if reads:
                with driver_of(connection) as driver:
                    driver.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

        @event.listens_for(engine, "close")
        def _close(_connection: Any, record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
            record.info.pop("wire", None)

        return engine

    def judge(self, error: Exception, *, committing: bool) -> Verdict:
        """By SQLSTATE. A connection that died before the commit was asked for took the transaction with it."""
        if isinstance(error, OSError):
            return Verdict.FAILED
        if not isinstance(error, DBAPIError):
            return Verdict.RAISE
        state = getattr(error.orig, "sqlstate", None) or ""
        if committing and state[:2] not in _ROLLED_BACK:
            return Verdict.UNKNOWN
        if error.connection_invalidated or state in _AGAIN:
            return Verdict.AGAIN
        if isinstance(error, OperationalError | InterfaceError):
            return Verdict.FAILED
        return Verdict.RAISE

    def clock_s(self, connection: Connection) -> float:
        """The server's time now, not that of the transaction's begin."""
        return connection.execute(_CLOCK).scalar_one()

    def lock(self, connection: Connection, name: str) -> None:
        """Take the transaction's advisory lock of that name; waits at most `lock_s`."""
        with driver_of(connection) as driver:
            driver.execute(_LOCK, (name,))

    def wire(self, connection: Connection) -> Wire | None:
        """The connection's socket."""
        return connection.info.get("wire")

    def _connect_args(self) -> dict[str, Any]:
        times = self._timeouts
        settings = {
            "statement_timeout": times.statement_s,
            "lock_timeout": times.lock_s,
            "idle_in_transaction_session_timeout": times.idle_s,
        }
        options = " ".join(f"-c {name}={round(value_s * 1000)}" for name, value_s in settings.items())
        ours = {
            "application_name": "tide-gateway",
            "connect_timeout": times.connect_s,
            "keepalives_idle": 10,
            "keepalives_interval": 3,
            "keepalives_count": 3,
            "tcp_user_timeout": round(times.statement_s * 2000),
            # After a failover the old primary must not be taken for the new one.
            "target_session_attrs": "read-write",
        }
        given = {name: value for name, value in self._url.query.items() if isinstance(value, str)}
        # What the operator wrote wins; of two settings of one name the server takes the later.
        return ours | given | {"options": f"{options} {given.get('options', '')}".strip()}
