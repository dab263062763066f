"""Tables of the trainer. Timestamps are UTC seconds; token payloads are files, named here by their hash."""

from __future__ import annotations

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Base of the trainer's tables; `tide-train migrate` owns their schema."""


class RunRow(Base):
    """One run of `tide-train run`."""

    __tablename__ = "runs"

    run: Mapped[str] = mapped_column(String(64), primary_key=True)
    status: Mapped[str] = mapped_column(String(16))
    model_version: Mapped[int] = mapped_column(Integer)
    config_json: Mapped[str] = mapped_column(Text)
    started_at_s: Mapped[float] = mapped_column(Float)
    ended_at_s: Mapped[float | None] = mapped_column(Float)
    task_key: Mapped[str] = mapped_column(String(128), server_default="")
    num_resumes: Mapped[int] = mapped_column(Integer, server_default="0")


class GroupRow(Base):
    """One prompt of a run and what became of it: running, ready, trained, dropped or waiting (both with a reason).

    A waiting one is sampled again later; `sampling` counts how often it was given up before.
    """

    __tablename__ = "groups"
    __table_args__ = (Index("ix_groups_run_status", "run", "status"),)

    run: Mapped[str] = mapped_column(ForeignKey("runs.run"), primary_key=True)
    uid: Mapped[str] = mapped_column(String(128), primary_key=True)
    environment: Mapped[str] = mapped_column(String(128))
    seed: Mapped[int] = mapped_column(Integer)
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    version: Mapped[int] = mapped_column(Integer)
    buffer_version: Mapped[int | None] = mapped_column(Integer)
    payload_hash: Mapped[str | None] = mapped_column(String(64))
    sampling: Mapped[int] = mapped_column(Integer, server_default="0")


class StalenessEntryRow(Base):
    """A group's place in the staleness buffers: V_traj, V_buf, and whether it is occupied or only reserved."""

    __tablename__ = "staleness_entries"

    run: Mapped[str] = mapped_column(ForeignKey("runs.run"), primary_key=True)
    entry: Mapped[str] = mapped_column(String(128), primary_key=True)
    version: Mapped[int] = mapped_column(Integer)
    buffer: Mapped[int] = mapped_column(Integer)
    occupied: Mapped[bool] = mapped_column(Boolean)


class TrajectoryRow(Base):
    """One finished attempt; `reward` is NULL after an infrastructure failure."""

    __tablename__ = "trajectories"

    run: Mapped[str] = mapped_column(ForeignKey("runs.run"), primary_key=True)
    uid: Mapped[str] = mapped_column(String(160), primary_key=True)
    group: Mapped[str] = mapped_column(String(128), index=True)
    outcome: Mapped[str] = mapped_column(String(32))
    reward: Mapped[float | None] = mapped_column(Float)
    turns: Mapped[int] = mapped_column(Integer)
    num_tokens: Mapped[int] = mapped_column(Integer)
    version: Mapped[int] = mapped_column(Integer)


class TrainStepRow(Base):
    """One optimizer update: `model_version` is the version that it made."""

    __tablename__ = "train_steps"

    run: Mapped[str] = mapped_column(ForeignKey("runs.run"), primary_key=True)
    model_version: Mapped[int] = mapped_column(Integer, primary_key=True)
    metrics_json: Mapped[str] = mapped_column(Text)
    ended_at_s: Mapped[float] = mapped_column(Float)


class RankRoleRow(Base):
    """The role that a rank has had since a model version."""

    __tablename__ = "rank_roles"

    run: Mapped[str] = mapped_column(ForeignKey("runs.run"), primary_key=True)
    rank: Mapped[str] = mapped_column(String(64), primary_key=True)
    model_version: Mapped[int] = mapped_column(Integer, primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
