"""Writes a group of task changes in one transaction: rows of tasks, starts, turns and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, bindparam, insert, update

from tide_gateway.blobs import BlobStore
from tide_gateway.database import Statement, write_rows
from tide_gateway.models import EventRow, StartRow, TaskImageRow, TaskRow, TurnRow
from tide_gateway.rows import Change, all_columns, mutable_columns, storable, turn_columns

_OF_A_TURN = (
    "state", "turn", "version", "worker", "due_s", "since_s", "idle_consumed_s", "turn_consumed_s", "active_consumed_s",
)  # fmt: skip
_MUTABLE = (
    *_OF_A_TURN, "epoch", "wall_since_s", "start_consumed_s", "end_consumed_s", "instance", "peer_task", "released",
    "reward", "outcome", "metrics", "detail",
)  # fmt: skip


def _insert(table: Any, *without: str, once: bool = False) -> Statement:
    assert isinstance(table, Table)
    values = {column.name: bindparam(column.name) for column in table.columns if column.name not in without}
    return Statement(insert(table).values(values).inline(), once=once)


def _update(table: Any, key: Mapping[str, str], names: Sequence[str]) -> Statement:
    """`key` names the parameter of each column by which a row is found."""
    assert isinstance(table, Table)
    statement = update(table).values({name: bindparam(name) for name in names})
    return Statement(statement.where(*(table.c[name] == bindparam(parameter) for name, parameter in key.items())))


_ROW = {"task_id": "b_task_id", "version": "b_version"}
_TASK_UPDATE = _update(TaskRow.__table__, _ROW, _MUTABLE)
_TASK_MOVE = _update(TaskRow.__table__, _ROW, _OF_A_TURN)
_TASK_INSERT = _insert(TaskRow.__table__)
_START_INSERT = _insert(StartRow.__table__)
# Who is too late with an action finds the other's here, which must not hide that its row is stale.
_TURN_INSERT = _insert(TurnRow.__table__, once=True)
# The same image may stand in many observations of a task.
_IMAGE_INSERT = _insert(TaskImageRow.__table__, once=True)
_EVENT_INSERT = _insert(EventRow.__table__, "id")
_START_UPDATE = _update(StartRow.__table__, {"task_id": "b_task_id"}, ["answer"])
_TURN_UPDATE = _update(TurnRow.__table__, {"task_id": "b_task_id", "turn": "b_turn"}, ["answer", "answered_s"])


class Stale(Exception):
    """Some row of a group is stale: none of it may be committed as a group."""


def write_group(
    connection: Connection,
    changes: Sequence[Change],
    blobs: BlobStore,
    *,
    and_one: tuple[Statement, Mapping[str, Any]] | None = None,
) -> None:
    """Write all changes in the caller's transaction; large bodies and images go to `blobs` first.

    Args:
        connection: the transaction.
        changes: of different tasks.
        blobs: takes large bodies and images.
        and_one: an update of one more row, and its values.

    Raises:
        Stale: a row's version does not match; the caller rolls back.
    """
    new = [change for change in changes if change.request is not None]
    # In one order for all replicas: two groups that hold the same rows wait for each other, and never in a circle.
    old = sorted((change for change in changes if change.request is None), key=lambda change: change.after.task_id)
    starts = [{"task_id": c.after.task_id, "request": blobs.put(c.request or b""), "answer": None} for c in new]
    # One statement for all, because of that order: the short one where it is enough for each of them.
    moves = all(change.only_moves for change in old)
    columns = turn_columns if moves else mutable_columns
    updates = [columns(c.after) | {"b_task_id": c.after.task_id, "b_version": c.after.version - 1} for c in old]
    whole = [
        (_TASK_INSERT, [all_columns(change.after) for change in new]),
        (_START_INSERT, starts),
        (_TASK_MOVE if moves else _TASK_UPDATE, updates),
        *_parts(changes, blobs),
        *([(and_one[0], [and_one[1]])] if and_one else []),
    ]
    batch = [(statement, rows) for statement, rows in whole if rows]
    for (statement, rows), count in zip(batch, write_rows(connection, batch), strict=True):
        and_one_row = and_one is not None and statement is and_one[0]
        if (and_one_row or statement in (_TASK_MOVE, _TASK_UPDATE)) and count != len(rows):
            raise Stale
        if statement is _TURN_INSERT and count != len(rows):
            raise ValueError("a turn that is to begin is stored already")


def _parts(changes: Sequence[Change], blobs: BlobStore) -> Sequence[tuple[Statement, Sequence[Mapping[str, Any]]]]:
    intents: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    firsts: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
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
        for image in change.images:
            blobs.keep(image.digest, image.data)
            images.append({"task_id": task_id, "digest": image.digest})
        for event in change.events:
            events.append(
                {"task_id": task_id, "at_s": event.at_s, "kind": event.kind, "detail": storable(event.detail)}
            )
    answers = (_TURN_UPDATE, results), (_START_UPDATE, firsts), (_IMAGE_INSERT, images)
    return (_TURN_INSERT, intents), *answers, (_EVENT_INSERT, events)
