"""What a later life of a run reads of the earlier one, and the one transaction with which it begins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from tide_trainer.persistence.models import (
    GroupRow,
    RankRoleRow,
    RunRow,
    StalenessEntryRow,
    TrainStepRow,
    TrajectoryRow,
)
from tide_trainer.scheduling.staleness_types import EntryRecord


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """One prompt as the earlier life left it; the fields are the row's."""

    uid: str
    status: str
    reason: str | None
    version: int
    buffer_version: int | None
    payload_hash: str | None
    sampling: int


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's rows.

    Attributes:
        model_version: of the last train step that was stored; the newest checkpoint may be older.
        config: as resolved when the run began.
        task_key: with what the last life's tasks begin at the gateway.
        entries: the staleness buffers' snapshot.
    """

    status: str
    model_version: int
    config: dict[str, Any]
    task_key: str
    num_resumes: int
    groups: tuple[StoredGroup, ...]
    entries: tuple[EntryRecord, ...]


@dataclass(frozen=True, slots=True)
class Rewind:
    """Where the run goes on.

    Attributes:
        version: the checkpoint's model version; train steps beyond it are forgotten.
        ready: groups that are complete and not trained at `version`.
        again: prompts to sample again: group, reason, and how often it was given up by then.
        entries: the staleness buffers from here on.
    """

    version: int
    ready: tuple[str, ...]
    again: tuple[tuple[str, str, int], ...]
    entries: tuple[EntryRecord, ...]


async def read_run(engine: AsyncEngine, run: str) -> StoredRun | None:
    """The rows of a run; None without any."""
    async with engine.connect() as connection:
        row = (await connection.execute(select(RunRow.__table__).where(RunRow.run == run))).mappings().first()
        if row is None:
            return None
        columns = [getattr(GroupRow, name) for name in StoredGroup.__dataclass_fields__]
        groups = [StoredGroup(*one) for one in await connection.execute(select(*columns).where(GroupRow.run == run))]
        columns = [getattr(StalenessEntryRow, name) for name in EntryRecord.__dataclass_fields__]
        found = await connection.execute(select(*columns).where(StalenessEntryRow.run == run))
        entries = [EntryRecord(*one) for one in found]
    return StoredRun(
        row["status"],
        row["model_version"],
        json.loads(row["config_json"]),
        row["task_key"],
        row["num_resumes"],
        tuple(groups),
        tuple(entries),
    )


async def rewind(engine: AsyncEngine, run: str, plan: Rewind) -> None:
    """Brings a run's rows to the plan, all or nothing; a life that is killed around it can be resumed again."""
    mine = GroupRow.run == run
    statements: list[Any] = [
        update(RunRow)
        .where(RunRow.run == run)
        .values(status="running", ended_at_s=None, model_version=plan.version, num_resumes=RunRow.num_resumes + 1),
        delete(StalenessEntryRow).where(StalenessEntryRow.run == run),
        delete(TrainStepRow).where(TrainStepRow.run == run, TrainStepRow.model_version > plan.version),
        delete(RankRoleRow).where(RankRoleRow.run == run, RankRoleRow.model_version >= plan.version),
    ]
    for uids in _parts(plan.ready):
        ready = update(GroupRow).where(mine, GroupRow.uid.in_(uids))
        statements.append(ready.values(status="ready", reason=None, buffer_version=None))
    for uid, reason, sampling in plan.again:
        waiting = {"status": "waiting", "reason": reason, "sampling": sampling}
        statements.append(
            update(GroupRow).where(mine, GroupRow.uid == uid).values(**waiting, buffer_version=None, payload_hash=None)
        )
        statements.append(delete(TrajectoryRow).where(TrajectoryRow.run == run, TrajectoryRow.group == uid))
    if plan.entries:
        statements.append(insert(StalenessEntryRow).values([{"run": run, **asdict(one)} for one in plan.entries]))
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(statement)


def _parts(uids: Sequence[str], size: int = 500) -> list[Sequence[str]]:
    """SQLite bounds the parameters of a statement."""
    return [uids[start : start + size] for start in range(0, len(uids), size)]
