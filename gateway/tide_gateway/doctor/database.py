"""The database as it stands: reached, its revision, its clock, and what its rows tell. Everything is only read."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, func, inspect, pool, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from tide_gateway.doctor.findings import Finding, fail, ok, warn
from tide_gateway.lifecycle import ENDED_S
from tide_gateway.members import LEASE_S, Members, this_replica
from tide_gateway.models import Base, DeploymentRow, InstanceRow, KeyRow, ReplicaRow, TaskRow
from tide_gateway.repository import InstanceState, Replica
from tide_sdk.migrations import make_config

CONNECT_S = 5
STATEMENT_S = 8
CONNECTIONS = 9
"""That one replica opens on PostgreSQL."""
MAX_SKEW_S = 2.0
EMPTY = "answers and is empty"
_CLOCK = text("SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)")
_ROOM = text(
    "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
    " - (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')"
)


@dataclass(slots=True)
class Facts:
    """What other checks need to know of the rows.

    Attributes:
        readable: the tables are there, in this version's form.
        deployment: the name of all that the gateways make; "" before the first one opened.
        has_keys: there is or was a key, None where that is not known.
        servers: names of environment servers that have a row.
        running: replicas that are alive.
        replicas: names of all that have a row, None where that is not known.
    """

    readable: bool = False
    deployment: str = ""
    has_keys: bool | None = None
    servers: frozenset[str] = frozenset()
    running: int = 0
    replicas: frozenset[str] | None = None
    findings: list[Finding] = field(default_factory=list[Finding])


def look(url: URL, environments: Collection[str] | None) -> Facts:
    """Read the database. Blocks, for a bounded time.

    Args:
        url: as `database_url` gives it.
        environments: the registered ones, None where that is not known.
    """
    facts = Facts()
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
        facts.findings.append(warn("database", f"{url.database} is not there yet", "`serve` or `migrate` makes it"))
        facts.has_keys, facts.replicas = False, frozenset()
        return facts
    engine = _reader(url)
    try:
        with engine.connect() as connection:
            _read(connection, url, environments, facts)
    except (SQLAlchemyError, sqlite3.Error) as error:
        words = str(getattr(error, "orig", None) or error).partition("\n")[0]
        hint = "the server is up, the URL, role and password (PGPASSWORD, ~/.pgpass) are right"
        fix = "check that " + ("it is a database of this gateway" if url.get_backend_name() == "sqlite" else hint)
        facts.findings.append(fail("database", f"cannot be read: {words}", fix))
    finally:
        engine.dispose()
    return facts


def _reader(url: URL) -> Engine:
    """An engine that cannot write, and makes no file: only SQLite's shared memory of readers is used where it is."""
    if url.get_backend_name() == "sqlite":
        path = os.path.realpath(str(url.database))
        # Without a log nobody uses it, and it may be read as it lies; with one its files are there already.
        mode = "mode=ro" if os.path.exists(f"{path}-wal") else "immutable=1"
        uri = f"file:{quote(path)}?{mode}"
        return create_engine(
            "sqlite://",
            creator=lambda: sqlite3.connect(uri, uri=True, timeout=CONNECT_S, check_same_thread=False),
            poolclass=pool.NullPool,
        )
    options = f"-c statement_timeout={STATEMENT_S * 1000} -c lock_timeout={STATEMENT_S * 1000}"
    given: dict[str, Any] = {"connect_timeout": CONNECT_S, "application_name": "tide-gateway doctor"}
    given["options"] = f"{options} {url.query.get('options', '')}".strip()
    return create_engine(
        url,
        poolclass=pool.NullPool,
        connect_args=given,
        hide_parameters=True,
        execution_options={"isolation_level": "REPEATABLE READ", "postgresql_readonly": True},
    )


def _read(connection: Connection, url: URL, environments: Collection[str] | None, facts: Facts) -> None:
    found, now_s = facts.findings, time.time()
    if url.get_backend_name() == "postgresql":
        before_s = time.time()
        now_s = float(connection.execute(_CLOCK).scalar_one())
        found += _clocks(now_s, before_s, time.time())
        found += _connections(int(connection.execute(_ROOM).scalar_one()))
    revision = _revision(connection, url)
    found.append(revision)
    if revision.fix:
        # Its tables are of another form, or there are none.
        if revision.says.endswith(EMPTY):
            facts.has_keys, facts.replicas = False, frozenset()
        return
    facts.readable = True
    row = connection.execute(select(DeploymentRow.name)).first()
    facts.deployment = "" if row is None else row[0]
    facts.has_keys = connection.execute(select(KeyRow.key_id).limit(1)).first() is not None
    _replicas(connection, now_s, facts)
    _instances(connection, environments, facts)
    states = select(TaskRow.state, func.count()).where(TaskRow.due_s < ENDED_S).group_by(TaskRow.state)
    counts = ", ".join(
        f"{number} {state}" for state, number in sorted((row[0], row[1]) for row in connection.execute(states))
    )
    found.append(ok("tasks", f"open: {counts or 'none'}"))


def _revision(connection: Connection, url: URL) -> Finding:
    script = ScriptDirectory.from_config(make_config("gateway", url))
    head = script.get_current_head()
    options = {"version_table": "gateway_alembic_version"}
    current = MigrationContext.configure(connection, opts=options).get_current_heads()
    where = url.render_as_string(hide_password=True)
    if not current:
        strange = sorted(set(inspect(connection).get_table_names()) & set(Base.metadata.tables))
        if strange:
            words = (
                f"{where} holds tables that are not this gateway's, and are in the way of its own: {', '.join(strange)}"
            )
            return fail("database", words, "name another database")
        return warn("database", f"{where} {EMPTY}", "`serve` or `migrate` makes the tables")
    if current == (head,):
        return ok("database", f"{where} answers, at revision {head}, this version's")
    if all(revision in {each.revision for each in script.walk_revisions()} for revision in current):
        words = f"{where} is at revision {', '.join(current)}, this version's is {head}"
        return warn("database", words, "`serve` or `migrate` brings it up; a backup first is wise")
    words = f"{where} is at revision {', '.join(current)}, which this version does not know: a newer one migrated it"
    return fail("database", words, "install the newer version, or name another database; this one starts no more")


def _clocks(database_s: float, before_s: float, after_s: float) -> list[Finding]:
    # Somewhere between the question and the answer.
    skew_s = max(before_s - database_s, database_s - after_s, 0.0)
    if skew_s <= MAX_SKEW_S:
        return [ok("clock", f"this machine's and the database's differ by less than {MAX_SKEW_S:g} s")]
    words = f"this machine's clock is {skew_s:.1f} s off the database's; tasks go by the database's, keys by both"
    return [warn("clock", words, "let both follow one time server (NTP)")]


def _connections(room: int) -> list[Finding]:
    if room >= CONNECTIONS:
        return [ok("connections", f"the server has room for {room} more; a replica takes {CONNECTIONS}")]
    words = f"the server has room for {room} more connections, and a replica takes {CONNECTIONS}"
    return [warn("connections", words, "raise max_connections, or close other clients' connections")]


def _replicas(connection: Connection, now_s: float, facts: Facts) -> None:
    rows = [Replica(**row) for row in connection.execute(select(ReplicaRow.__table__)).mappings()]
    members = Members(this_replica("doctor", now_s))
    dead = [row for row in rows if not members.is_alive(row, now_s)]
    facts.running = len(rows) - len(dead)
    facts.replicas = frozenset(row.name for row in rows)
    for row in dead:
        words = f"replica {row.name} (pid {row.pid}) is dead, last seen {now_s - row.seen_s:.0f} s ago"
        after = f"another one takes over its tasks and servers within {LEASE_S:g} s"
        fix = after if facts.running else "start a gateway: it goes on with the tasks and servers that are left"
        facts.findings.append(warn("replicas", words, fix))
    if not dead:
        facts.findings.append(ok("replicas", f"{facts.running} running"))


def _instances(connection: Connection, environments: Collection[str] | None, facts: Facts) -> None:
    rows: Sequence[Any] = connection.execute(select(InstanceRow.__table__)).mappings().all()
    facts.servers = frozenset(row["name"] for row in rows)
    by_state = {state: [row for row in rows if row["state"] == state.value] for state in InstanceState}
    found = facts.findings
    for row in by_state[InstanceState.CONDEMNED]:
        words = f"{row['name']} is condemned: {row['detail']}"
        found.append(warn("servers", words, "it goes with its last task; look at its log for why"))
    for row in by_state[InstanceState.GONE]:
        found.append(warn("servers", f"{row['name']} is being removed: {row['detail']}", "if it stays, see the log"))
    strange = sorted({row["environment"] for row in rows} - set(environments)) if environments is not None else []
    if strange:
        words = f"there are servers of environments that the configuration does not have: {', '.join(strange)}"
        found.append(
            warn("servers", words, "a gateway with it ends their tasks and removes them; is it the right one?")
        )
    counts = ", ".join(f"{len(some)} {state.value}" for state, some in by_state.items() if some)
    found.append(ok("servers", counts or "none"))
