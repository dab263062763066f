"""A disk that takes no writes: callers are told to call again, and nothing is lost once it does."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

import pytest

from tide_gateway.blobs import MAX_INLINE_BYTES, BlobStore
from tide_gateway.database import Database, StorageFailed
from tide_gateway.repository import group
from tide_sdk.errors import TideError


@pytest.fixture
def disk(monkeypatch) -> Callable[..., None]:
    """Fills the disk for the changes that `refuses` picks, or frees it."""
    honest = group.write_group

    def fill(refuses: Callable[..., bool] | None) -> None:
        def write(connection, changes, blobs) -> None:
            if refuses is not None and any(refuses(change) for change in changes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            honest(connection, changes, blobs)

        monkeypatch.setattr(group, "write_group", write)

    return fill


async def refused(call) -> TideError:
    with pytest.raises(TideError) as caught:
        await call
    assert "No space left" in caught.value.detail
    return caught.value


async def test_a_start_that_cannot_be_written_is_told_to_call_again_and_takes_no_slot(bench, disk):
    disk(lambda _change: True)
    error = await refused(bench.start())
    assert (error.code, error.extra["retry_after_s"]) == ("unavailable", 1)
    assert await bench.taken() == 0
    disk(None)
    assert (await bench.start())["turn"] == 0


async def test_a_turn_that_cannot_be_written_does_not_act(bench, disk):
    task_id = (await bench.start())["task_id"]
    disk(lambda _change: True)
    assert (await refused(bench.act(task_id, 0))).code == "unavailable"
    assert bench.effects() == 0
    disk(None)
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1


async def test_an_answer_that_cannot_be_written_is_given_later_and_not_acted_again(bench, disk):
    task_id = (await bench.start())["task_id"]
    disk(lambda change: change.result is not None)
    assert (await refused(bench.act(task_id, 0))).code == "unavailable"
    disk(None)
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1
    assert bench.effects() == 1


async def test_overdue_tasks_are_tried_again_and_logged_in_one_line(bench, disk, caplog):
    tasks = [(await bench.start(key=f"k{number}"))["task_id"] for number in range(5)]
    bench.time.advance(1000)
    disk(lambda _change: True)
    with caplog.at_level(logging.INFO):
        failures = await bench.service._sweeper.expire()
    assert [error.code for error in failures] == ["unavailable"] * 5
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is None
    disk(None)
    await bench.service.sweep()
    assert {await bench.state(task_id) for task_id in tasks} <= {"ending", "ended"}


async def test_a_stop_on_a_full_disk_stops(bench, monkeypatch):
    await bench.start()

    async def write(_self, _fn) -> None:
        raise StorageFailed("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Database, "write", write)
        await bench.service.stop(drain_s=0.0)
    assert bench.runtime.servers == {}


def test_half_a_body_is_not_left_behind(tmp_path, monkeypatch):
    def replace(_part, _path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        BlobStore(tmp_path).put(b"{" + b"x" * MAX_INLINE_BYTES)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
