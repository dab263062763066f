"""Writes and reads of the trainer's rows; one transaction per call, in the order of the calls, committed at its return.

What changes a group's row and its place in the staleness buffers takes the buffers' changes along: both are written in
one transaction, so that a killed run finds them in one state. Such a call has its place in the order when it returns
its awaitable, not when that is awaited.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import delete, event, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tide_trainer.persistence.models import (
    GroupRow,
    RankRoleRow,
    RunRow,
    StalenessEntryRow,
    TrainStepRow,
    TrajectoryRow,
)
from tide_trainer.persistence.ordered_writes import OrderedWrites
from tide_trainer.persistence.payloads import Payloads
from tide_trainer.scheduling.staleness_types import EntryChanges
from tide_trainer.types import Group, Prompt, RankId, Role, Trajectory

ENDED_FIRST = "the run ended first"
"""Why prompts are dropped at a run's end; a run that goes on takes them up again."""
NO_CHANGES = EntryChanges()


class RunRepository:
    """The rows of one run.

    Args:
        url: SQLAlchemy async URL of a migrated database.
        run: the run's name.
        payloads: folder for token payloads, files named by SHA-256.

    Attributes:
        payloads: the token payloads; `finish_group` names what was stored there.
    """

    def __init__(self, url: str, run: str, payloads: Path) -> None:
        self._engine: AsyncEngine = create_async_engine(url)
        if url.startswith("sqlite"):
            event.listen(self._engine.sync_engine, "connect", _wal)
        self._run = run
        self._writes = OrderedWrites(self._engine)
        self.payloads = Payloads(payloads)

    @property
    def run(self) -> str:
        """The run's name."""
        return self._run

    @property
    def engine(self) -> AsyncEngine:
        """The database, for reads of other modules here."""
        return self._engine

    async def open_run(self, config: Mapping[str, Any], now_s: float) -> None:
        """Adds the run's row; a run of the same name in this database is an error (IntegrityError)."""
        await self._write(
            insert(RunRow).values(
                run=self._run, status="running", model_version=0, config_json=json.dumps(config), started_at_s=now_s
            )
        )

    async def close_run(self, status: str, now_s: float) -> None:
        """Marks the run's end: completed, stopped or failed."""
        await self._write(update(RunRow).where(RunRow.run == self._run).values(status=status, ended_at_s=now_s))

    async def set_task_key(self, key: str) -> None:
        """Notes with what the keys of this life's tasks begin at the gateway, so that the next one can end them."""
        await self._write(update(RunRow).where(RunRow.run == self._run).values(task_key=key))

    def add_group(
        self, uid: str, prompt: Prompt, version: int, sampling: int = 0, changes: EntryChanges = NO_CHANGES
    ) -> Awaitable[object]:
        """A prompt has been taken from the source; from here it is trained once or dropped with a reason.

        Args:
            uid: the group's.
            prompt: what it answers.
            version: V_traj.
            sampling: 0 where it is new, else how often it was given up before.
            changes: of the staleness buffers.
        """
        values = {"status": "running", "reason": None, "version": version, "buffer_version": None}
        if sampling:
            write = self._group(uid).values(**values, payload_hash=None, sampling=sampling)
        else:
            new = {"run": self._run, "uid": uid, "environment": prompt.environment, "seed": prompt.seed}
            write = insert(GroupRow).values(**new, **values)
        return self._writes.write(write, *self._follow(changes))

    def finish_group(self, group: Group, payload: str, changes: EntryChanges = NO_CHANGES) -> Awaitable[object]:
        """All siblings are done, and `payload` is stored; writes the rows that name it."""
        rows = [self._trajectory_values(trajectory) for trajectory in group.trajectories]
        ready = self._group(group.uid).values(status="ready", version=group.version, payload_hash=payload)
        return self._writes.write(insert(TrajectoryRow).values(rows), ready, *self._follow(changes))

    def drop_group(self, uid: str, reason: str, changes: EntryChanges = NO_CHANGES) -> Awaitable[object]:
        """The prompt will not be trained."""
        return self._writes.write(
            self._group(uid).values(status="dropped", reason=reason, buffer_version=None), *self._follow(changes)
        )

    def put_back(self, uid: str, reason: str, sampling: int, changes: EntryChanges = NO_CHANGES) -> Awaitable[object]:
        """The group was given up, and its prompt will be sampled again: for the time that `sampling` says."""
        values = {"status": "waiting", "reason": reason, "sampling": sampling, "payload_hash": None}
        played = delete(TrajectoryRow).where(TrajectoryRow.run == self._run, TrajectoryRow.group == uid)
        return self._writes.write(
            self._group(uid).values(**values, buffer_version=None), played, *self._follow(changes)
        )

    def consume(
        self, groups: Iterable[str], buffer_version: int, changes: EntryChanges = NO_CHANGES
    ) -> Awaitable[object]:
        """The groups leave the buffers for the train step at `buffer_version`; `add_train_step` has them trained."""
        taken = update(GroupRow).where(GroupRow.run == self._run, GroupRow.uid.in_(list(groups)))
        return self._writes.write(taken.values(buffer_version=buffer_version), *self._follow(changes))

    async def add_train_step(
        self, groups: Iterable[str], buffer_version: int, metrics: Mapping[str, Any], now_s: float
    ) -> None:
        """One optimizer update: its groups are trained and the model version moves, in one transaction."""
        version = buffer_version + 1
        await self._write(
            update(GroupRow)
            .where(GroupRow.run == self._run, GroupRow.uid.in_(list(groups)), GroupRow.status == "ready")
            .values(status="trained", buffer_version=buffer_version),
            insert(TrainStepRow).values(
                run=self._run, model_version=version, metrics_json=json.dumps(metrics), ended_at_s=now_s
            ),
            update(RunRow).where(RunRow.run == self._run).values(model_version=version),
        )

    async def set_roles(self, roles: Mapping[RankId, Role], version: int) -> None:
        """Records the roles that hold from `version` on."""
        rows = [
            {"run": self._run, "rank": str(rank), "role": role.value, "model_version": version}
            for rank, role in roles.items()
        ]
        if rows:
            await self._write(insert(RankRoleRow).values(rows))

    async def drop_unfinished(self, reason: str) -> int:
        """Accounts for every prompt that is neither trained nor dropped yet; returns how many there were."""
        counts = await self._writes.write(
            update(GroupRow)
            .where(GroupRow.run == self._run, GroupRow.status.in_(["running", "ready", "waiting"]))
            .values(status="dropped", reason=reason),
            delete(StalenessEntryRow).where(StalenessEntryRow.run == self._run),
        )
        return counts[0]

    async def account(self) -> dict[str, int]:
        """Number of prompts by status, and by reason for dropped ones (`dropped: <reason>`)."""
        async with self._engine.connect() as connection:
            rows = await connection.execute(
                select(GroupRow.status, GroupRow.reason, func.count())
                .where(GroupRow.run == self._run)
                .group_by(GroupRow.status, GroupRow.reason)
            )
            return {f"{status}: {reason}" if reason else status: count for status, reason, count in rows}

    async def largest_staleness(self) -> int:
        """Largest `V_buf - V_traj` of the groups that were trained; 0 before the first."""
        async with self._engine.connect() as connection:
            value = await connection.scalar(
                select(func.max(GroupRow.buffer_version - GroupRow.version)).where(
                    GroupRow.run == self._run, GroupRow.status == "trained"
                )
            )
        return int(value or 0)

    async def close(self) -> None:
        """Commits what was asked for and returns every connection."""
        await self._writes.close()
        await self._engine.dispose()

    async def _write(self, *statements: Any) -> None:
        await self._writes.write(*statements)

    def _group(self, uid: str) -> Any:
        return update(GroupRow).where(GroupRow.run == self._run, GroupRow.uid == uid)

    def _follow(self, changes: EntryChanges) -> list[Any]:
        """Statements that bring the entries' rows to what the buffers hold now."""
        statements: list[Any] = []
        entries = [*changes.gone, *(record.entry for record in changes.put)]
        if entries:
            table = StalenessEntryRow
            statements.append(delete(table).where(table.run == self._run, table.entry.in_(entries)))
        if changes.put:
            statements.append(
                insert(StalenessEntryRow).values([{"run": self._run, **asdict(record)} for record in changes.put])
            )
        return statements

    def _trajectory_values(self, trajectory: Trajectory) -> dict[str, Any]:
        return {
            "run": self._run,
            "uid": trajectory.uid,
            "group": trajectory.group,
            "outcome": trajectory.outcome,
            "reward": trajectory.reward,
            "turns": trajectory.turns,
            "num_tokens": sum(len(segment.token_ids) for segment in trajectory.segments),
            "version": trajectory.version,
        }


def _wal(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
