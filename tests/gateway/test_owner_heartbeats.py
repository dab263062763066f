"""Owners' heartbeats: a dead trainer's tasks end, and an outage of the gateway's own ends none."""

from __future__ import annotations

import pytest

OTHER = "other"


async def beat(bench, prefix: str = "run/", timeout_s: float | None = 10.0, owner: str = "local") -> int:
    return await bench.service.heartbeat(owner, prefix, timeout_s)


async def started(bench, key: str, owner: str = "local") -> str:
    return (await bench.start(key, owner=owner, limits=dict.fromkeys(("idle", "active"), 1e6)))["task_id"]


async def swept_after(bench, seconds: float) -> None:
    bench.time.advance(seconds)
    await bench.service.sweep()


async def test_a_silent_owners_tasks_end_paused_ones_too_and_nobody_elses(bench, eventually):
    mine, paused = await started(bench, "run/1"), await started(bench, "run/2")
    elsewhere, theirs = await started(bench, "runs/1"), await started(bench, "run/1", OTHER)
    await bench.pause(paused, 1)
    assert await beat(bench) == 2
    await swept_after(bench, 9.9)
    assert await bench.state(mine) == "waiting"
    await swept_after(bench, 0.2)
    for task_id in (mine, paused):
        account = await bench.end(task_id)
        assert (account["outcome"]["kind"], account["outcome"]["reason"]) == ("aborted", "owner_lost")
    assert await bench.state(elsewhere) == "waiting"
    assert (await bench.service.task(OTHER, theirs)).state.value == "waiting"


async def test_beats_in_time_keep_tasks_and_a_withdrawn_promise_is_none(bench):
    task_id = await started(bench, "run/1")
    for _ in range(5):
        await beat(bench)
        await swept_after(bench, 9.0)
    assert await bench.state(task_id) == "waiting"
    await beat(bench, timeout_s=None)
    await swept_after(bench, 1000.0)
    assert await bench.state(task_id) == "waiting"


@pytest.mark.parametrize("prefix", ["r%", "ru_", "run\\", "RUN"])
async def test_a_prefix_is_taken_literally(bench, prefix):
    task_id = await started(bench, "run/1")
    assert await beat(bench, prefix) == 0
    await swept_after(bench, 11.0)
    assert await bench.state(task_id) == "waiting"


async def test_a_broken_promise_is_over_with_its_tasks(bench):
    await started(bench, "run/1")
    await beat(bench)
    await swept_after(bench, 11.0)
    later = await started(bench, "run/2")
    await swept_after(bench, 11.0)
    assert await bench.state(later) == "waiting"


async def test_an_outage_of_the_gateway_counts_for_no_owner(benches):
    bench = await benches.open()
    task_id = await started(bench, "run/1")
    await beat(bench)
    await swept_after(bench, 4.0)
    await benches.crash(bench)
    benches.time.advance(10_000.0)
    bench = await benches.open()
    await swept_after(bench, 5.0)
    assert await bench.state(task_id) == "waiting"
    await swept_after(bench, 2.0)
    assert (await bench.end(task_id))["outcome"]["reason"] == "owner_lost"
