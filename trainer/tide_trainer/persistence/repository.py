"""Writes and reads of the trainer's rows; one transaction per call, committed before it returns."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import event, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tide_trainer.persistence.models import GroupRow, RankRoleRow, RunRow, TrainStepRow, TrajectoryRow
from tide_trainer.types import Group, Prompt, RankId, Role, Trajectory


class RunRepository:
    """The rows of one run.

    Args:
        url: SQLAlchemy async URL of a migrated database.
        run: the run's name.
        payloads: folder for token payloads, files named by SHA-256.
    """

    def __init__(self, url: str, run: str, payloads: Path) -> None:
        self._engine: AsyncEngine = create_async_engine(url)
        if url.startswith("sqlite"):
            event.listen(self._engine.sync_engine, "connect", _wal)
        self._run = run
        self._payloads = payloads

    @property
    def run(self) -> str:
        """The run's name."""
        return self._run

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

    async def add_group(self, uid: str, prompt: Prompt, version: int) -> None:
        """A prompt has been taken from the source; from here it is trained once or dropped with a reason."""
        await self._write(
            insert(GroupRow).values(
                run=self._run,
                uid=uid,
                environment=prompt.environment,
                seed=prompt.seed,
                status="running",
                version=version,
            )
        )

    async def finish_group(self, group: Group) -> None:
        """All siblings are done: stores the payload file first, then the rows that name it."""
        digest = await asyncio.to_thread(self._store_payload, group)
        rows = [self._trajectory_values(trajectory) for trajectory in group.trajectories]
        await self._write(
            insert(TrajectoryRow).values(rows),
            update(GroupRow)
            .where(GroupRow.run == self._run, GroupRow.uid == group.uid)
            .values(status="ready", version=group.version, payload_hash=digest),
        )

    async def drop_group(self, uid: str, reason: str) -> None:
        """The prompt will not be trained."""
        await self._write(
            update(GroupRow)
            .where(GroupRow.run == self._run, GroupRow.uid == uid)
            .values(status="dropped", reason=reason)
        )

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
        async with self._engine.begin() as connection:
            result = await connection.execute(
                update(GroupRow)
                .where(GroupRow.run == self._run, GroupRow.status.in_(["running", "ready"]))
                .values(status="dropped", reason=reason)
            )
        return result.rowcount

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
        """Returns every connection."""
        await self._engine.dispose()

    async def _write(self, *statements: Any) -> None:
        async with self._engine.begin() as connection:
            for statement in statements:
                await connection.execute(statement)

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

    def _store_payload(self, group: Group) -> str:
        data = json.dumps([asdict(trajectory) for trajectory in group.trajectories]).encode()
        digest = hashlib.sha256(data).hexdigest()
        path = self._payloads / digest[:2] / f"{digest}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_bytes(data)
            partial.replace(path)
        return digest


def _wal(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
