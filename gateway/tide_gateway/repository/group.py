"""Writes a group of task changes in one transaction: rows of tasks, starts, turns and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, insert, update

from tide_gateway.blobs import BlobStore
from tide_gateway.models import EventRow, StartRow, TaskRow, TurnRow
from tide_gateway.rows import Change, all_columns, mutable_columns, storable

_MUTABLE = (
    "state", "turn", "epoch", "version", "worker", "wall_since_s",
    "due_s", "since_s", "start_consumed_s", "idle_consumed_s",
    "turn_consumed_s", "active_consumed_s", "end_consumed_s", "instance", "peer_task", "released", "reward",
    "outcome", "metrics", "detail",
)  # fmt: skip
_TASK_UPDATE = (
    update(TaskRow.__table__)  # type: ignore[arg-type]
    .where(TaskRow.task_id == bindparam("b_task_id"), TaskRow.version == bindparam("b_version"))
    .values({name: bindparam(name) for name in _MUTABLE})
)
_TASK_INSERT = insert(TaskRow.__table__)  # type: ignore[arg-type]
_START_INSERT = insert(StartRow.__table__)  # type: ignore[arg-type]
_TURN_INSERT = insert(TurnRow.__table__)  # type: ignore[arg-type]
_EVENT_INSERT = insert(EventRow.__table__)  # type: ignore[arg-type]
_START_UPDATE = (
    update(StartRow.__table__)  # type: ignore[arg-type]
    .where(StartRow.task_id == bindparam("b_task_id"))
    .values(answer=bindparam("answer"))
)
_TURN_UPDATE = (
    update(TurnRow.__table__)  # type: ignore[arg-type]
    .where(TurnRow.task_id == bindparam("b_task_id"), TurnRow.turn == bindparam("b_turn"))
    .values(answer=bindparam("answer"), answered_s=bindparam("answered_s"))
)


class Stale(Exception):
    """Some row of a group is stale: none of it may be committed as a group."""


def write_group(connection: Connection, changes: Sequence[Change], blobs: BlobStore) -> None:
    """Write all changes in the caller's transaction; large bodies go to `blobs` first.

    Raises:
        Stale: a row's version does not match; the caller rolls back.
    """
    new = [change for change in changes if change.request is not None]
    # In one order for all replicas: two groups that hold the same rows wait for each other, and never in a circle.
    old = sorted((change for change in changes if change.request is None), key=lambda change: change.after.task_id)
    if new:
        connection.execute(_TASK_INSERT, [all_columns(change.after) for change in new])
        rows = [{"task_id": c.after.task_id, "request": blobs.put(c.request or b""), "answer": None} for c in new]
        connection.execute(_START_INSERT, rows)
    if old:
        updates = [
            mutable_columns(c.after) | {"b_task_id": c.after.task_id, "b_version": c.after.version - 1} for c in old
        ]
        if connection.execute(_TASK_UPDATE, updates).rowcount != len(old):
            raise Stale
    _write_parts(connection, changes, blobs)


def _write_parts(connection: Connection, changes: Sequence[Change], blobs: BlobStore) -> None:
    intents: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    firsts: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for change in changes:
        task_id = change.after.task_id
        if change.intent is not None:
            row = {"turn": change.intent.turn, "action": blobs.put(change.intent.action), "acted_s": change.intent.at_s}
            intents.append({"task_id": task_id, "answer": None, "answered_s": None} | row)
        if change.result is not None:
            row = {"answer": blobs.put(change.result.answer), "answered_s": change.result.at_s}
            results.append({"b_task_id": task_id, "b_turn": change.result.turn} | row)
        if change.first is not None:
            firsts.append({"b_task_id": task_id, "answer": blobs.put(change.first)})
        for event in change.events:
            events.append(
                {"task_id": task_id, "at_s": event.at_s, "kind": event.kind, "detail": storable(event.detail)}
            )
    for statement, rows in (
        (_TURN_INSERT, intents),
        (_TURN_UPDATE, results),
        (_START_UPDATE, firsts),
        (_EVENT_INSERT, events),
    ):
        if rows:
            connection.execute(statement, rows)
