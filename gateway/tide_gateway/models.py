"""The gateway's tables. SQL is the truth: what is not in these rows has not happened.

No foreign key leaves these tables, and the trainer's tables may live in the same database.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, Index, Integer, LargeBinary, MetaData, String, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


_HOLDING = text("released = 0")


class Base(DeclarativeBase):
    """Base of the gateway's tables."""

    metadata = MetaData(naming_convention=NAMING)


class TaskRow(Base):
    """One attempt of one task.

    A clock is `<name>_limit_s` and `<name>_consumed_s`; all clocks that run began to run at `since_s`, and which run
    follows from `state`. `due_s` is derived from them at every write so that the sweep finds overdue rows by an index.
    `worker` is the replica that has something in flight for the task, "" where none has; any replica may take over
    what a dead one left. The two caps are `ASLEEP_S` where the operator set none.
    """

    __tablename__ = "tasks"
    __table_args__ = (
        UniqueConstraint("owner", "key", "attempt"),
        Index("ix_tasks_due_s", "due_s"),
        Index("ix_tasks_owner_task_id", "owner", "task_id"),
        # Slots are counted over these two: an unreleased task holds one, whatever its state.
        Index("ix_tasks_holding", "environment", "owner", sqlite_where=_HOLDING, postgresql_where=_HOLDING),
        Index("ix_tasks_instance", "instance", sqlite_where=_HOLDING, postgresql_where=_HOLDING),
    )

    task_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(String(128))
    environment: Mapped[str] = mapped_column(String(128))
    key: Mapped[str] = mapped_column(String(512))
    attempt: Mapped[int] = mapped_column(Integer)
    kind: Mapped[str] = mapped_column(String(8))
    created_s: Mapped[float] = mapped_column(Float)
    state: Mapped[str] = mapped_column(String(16))
    turn: Mapped[int] = mapped_column(Integer)
    epoch: Mapped[int] = mapped_column(BigInteger)
    version: Mapped[int] = mapped_column(BigInteger)
    due_s: Mapped[float] = mapped_column(Float)
    since_s: Mapped[float] = mapped_column(Float)
    start_limit_s: Mapped[float] = mapped_column(Float)
    start_consumed_s: Mapped[float] = mapped_column(Float)
    idle_limit_s: Mapped[float] = mapped_column(Float)
    idle_consumed_s: Mapped[float] = mapped_column(Float)
    turn_limit_s: Mapped[float] = mapped_column(Float)
    turn_consumed_s: Mapped[float] = mapped_column(Float)
    active_limit_s: Mapped[float] = mapped_column(Float)
    active_consumed_s: Mapped[float] = mapped_column(Float)
    end_limit_s: Mapped[float] = mapped_column(Float)
    end_consumed_s: Mapped[float] = mapped_column(Float)
    max_pause_s: Mapped[float] = mapped_column(Float)
    max_wall_s: Mapped[float] = mapped_column(Float)
    wall_since_s: Mapped[float] = mapped_column(Float)
    worker: Mapped[str] = mapped_column(String(64))
    instance: Mapped[str] = mapped_column(String(128))
    peer_task: Mapped[str] = mapped_column(String(128))
    released: Mapped[int] = mapped_column(Integer)
    reward: Mapped[float | None] = mapped_column(Float)
    outcome: Mapped[bytes | None] = mapped_column(LargeBinary)
    metrics: Mapped[bytes | None] = mapped_column(LargeBinary)
    detail: Mapped[str] = mapped_column(Text)


class StartRow(Base):
    """What a task was started with, and its first observation once there is one. Apart from `tasks`, whose rows are
    rewritten at every turn. Large bodies are references (`tide_gateway.blobs`)."""

    __tablename__ = "task_starts"

    task_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    request: Mapped[bytes] = mapped_column(LargeBinary)
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)


class TurnRow(Base):
    """One turn: the intent (action, before it goes out) and the result (answer, before it is given)."""

    __tablename__ = "turns"

    task_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    turn: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    action: Mapped[bytes] = mapped_column(LargeBinary)
    acted_s: Mapped[float] = mapped_column(Float)
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)
    answered_s: Mapped[float | None] = mapped_column(Float)


class TaskImageRow(Base):
    """An image that some observation of a task shows; its bytes are a file (`tide_gateway.blobs`) of that name.

    Attributes:
        digest: SHA-256 (hex) of its bytes. Whose tasks have it may read it, and while a row has it it is kept.
    """

    __tablename__ = "task_images"
    __table_args__ = (Index("ix_task_images_digest", "digest"),)

    task_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)


class EventRow(Base):
    """One line of a task's history, for people and for tests; turns are in `turns`."""

    __tablename__ = "task_events"
    __table_args__ = (Index("ix_task_events_task_id", "task_id"),)

    # SQLite numbers rows by itself only where the key's type is exactly INTEGER.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    task_id: Mapped[str] = mapped_column(String(64))
    at_s: Mapped[float] = mapped_column(Float)
    kind: Mapped[str] = mapped_column(String(32))
    detail: Mapped[str] = mapped_column(Text)


class InstanceRow(Base):
    """One environment server, written before it is created, so that a crash leaves nothing without a name.

    `replica` keeps it: launches, probes and destroys it; another one takes over when that replica is dead. `place` is
    how it is reached (`tide_gateway.runtimes.Place` as JSON), `slot` its number among the environment's servers,
    `served` the tasks that it was ever given.
    """

    __tablename__ = "instances"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    environment: Mapped[str] = mapped_column(String(128))
    runtime: Mapped[str] = mapped_column(String(32))
    replica: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    version: Mapped[int] = mapped_column(BigInteger)
    slot: Mapped[int] = mapped_column(Integer)
    capacity: Mapped[int] = mapped_column(Integer)
    served: Mapped[int] = mapped_column(Integer)
    incarnation: Mapped[str] = mapped_column(String(128))
    place: Mapped[str] = mapped_column(Text)
    created_s: Mapped[float] = mapped_column(Float)
    detail: Mapped[str] = mapped_column(Text)


class DeploymentRow(Base):
    """What all replicas on one database share; exactly one row.

    `name` is random and made once: it labels everything that the replicas create outside the database. `seen_s` is the
    newest heartbeat of any replica and outlives their rows: from it outages are known.
    """

    __tablename__ = "deployment"

    one: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(32))
    seen_s: Mapped[float] = mapped_column(Float)


class ReplicaRow(Base):
    """One running gateway process; `seen_s` is its heartbeat, `host` the machine (and its process namespace)."""

    __tablename__ = "replicas"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    host: Mapped[str] = mapped_column(String(256))
    pid: Mapped[int] = mapped_column(Integer)
    ticks: Mapped[int] = mapped_column(BigInteger)
    started_s: Mapped[float] = mapped_column(Float)
    seen_s: Mapped[float] = mapped_column(Float)


class HeartbeatRow(Base):
    """An owner's promise to call again within `timeout_s`; if broken, its tasks whose key has the prefix end."""

    __tablename__ = "heartbeats"

    owner: Mapped[str] = mapped_column(String(128), primary_key=True)
    prefix: Mapped[str] = mapped_column(String(512), primary_key=True)
    timeout_s: Mapped[float] = mapped_column(Float)
    seen_s: Mapped[float] = mapped_column(Float)


class TicketRow(Base):
    """A refused start's place in its environment's queue, kept until it calls again or `expires_s`."""

    __tablename__ = "start_tickets"

    environment: Mapped[str] = mapped_column(String(128), primary_key=True)
    owner: Mapped[str] = mapped_column(String(128), primary_key=True)
    key: Mapped[str] = mapped_column(String(512), primary_key=True)
    kind: Mapped[str] = mapped_column(String(8))
    asked_s: Mapped[float] = mapped_column(Float)
    expires_s: Mapped[float] = mapped_column(Float)


class StartRateRow(Base):
    """An environment's start rate: the moment from which the next start is within the rate (GCRA)."""

    __tablename__ = "start_rates"

    environment: Mapped[str] = mapped_column(String(128), primary_key=True)
    next_s: Mapped[float] = mapped_column(Float)


class OwnerRow(Base):
    """An owner and its limit of tasks at once over all environments, 0 for none."""

    __tablename__ = "owners"

    owner: Mapped[str] = mapped_column(String(128), primary_key=True)
    max_tasks: Mapped[int] = mapped_column(Integer)
    created_s: Mapped[float] = mapped_column(Float)


class KeyRow(Base):
    """An API key, of which only the SHA-256 digest is kept. `revoked_s` is 0 while it is valid."""

    __tablename__ = "api_keys"

    key_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    owner: Mapped[str] = mapped_column(String(128))
    role: Mapped[str] = mapped_column(String(16))
    label: Mapped[str] = mapped_column(String(128))
    created_s: Mapped[float] = mapped_column(Float)
    expires_s: Mapped[float] = mapped_column(Float)
    revoked_s: Mapped[float] = mapped_column(Float)
