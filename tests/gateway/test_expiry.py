"""Every clock's expiry on a manual clock, pauses, and what a restart does to clocks."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk.errors import TideError


async def refused(call) -> TideError:
    with pytest.raises(TideError) as caught:
        await call
    return caught.value


async def test_idle_expiry_by_the_sweep(bench):
    task_id = (await bench.start(limits={"idle": 0.25}))["task_id"]
    bench.time.advance(0.24)
    await bench.service.sweep()
    assert await bench.state(task_id) == "waiting"
    bench.time.advance(0.02)
    await bench.service.sweep()
    error = await refused(bench.act(task_id, 0))
    assert (error.code, error.extra["clock"]) == ("expired", "idle")
    account = await bench.end(task_id)
    assert account["outcome"] == {"kind": "expired", "clock": "idle", "reason": None}
    assert account["limits" if "limits" in account else "clocks"]["idle"]["limit_s"] == 0.25
    assert await bench.taken() == 0


async def test_a_late_turn_is_refused_even_before_the_sweep_comes(bench):
    task_id = (await bench.start())["task_id"]
    bench.time.advance(20.0)
    assert (await refused(bench.act(task_id, 0))).code == "expired"
    assert bench.effects() == 0
    other = (await bench.start("other"))["task_id"]
    bench.time.advance(20.0)
    assert (await bench.end(other))["outcome"]["kind"] == "expired"


async def test_g05_hundreds_of_reads_extend_nothing(bench):
    task_id = (await bench.start())["task_id"]
    for _ in range(100):
        bench.time.advance(0.199)
        await bench.service.latest("local", task_id)
        await bench.service.task("local", task_id)
        await bench.start()
    bench.time.advance(0.2)
    assert (await refused(bench.service.latest("local", task_id))).code == "expired"


async def test_turn_expiry_answers_504_then_410(bench, eventually):
    task_id = (await bench.start(hang_turn=0))["task_id"]
    waiting = asyncio.create_task(bench.act(task_id, 0))
    await eventually(lambda: bench.effects() == 1, "the action runs")
    bench.time.advance(10.0)
    await bench.service.sweep()
    error = await refused(waiting)
    assert (error.code, error.extra["clock"]) == ("turn_expired", "turn")
    assert (await refused(bench.act(task_id, 0))).code == "expired"
    assert (await bench.end(task_id))["outcome"]["clock"] == "turn"


async def test_active_expiry_answers_410_to_who_waits(bench, eventually):
    task_id = (await bench.start(hang_turn=0, limits={"active": 5.0}))["task_id"]
    waiting = asyncio.create_task(bench.act(task_id, 0))
    await eventually(lambda: bench.effects() == 1, "the action runs")
    bench.time.advance(5.0)
    await bench.service.sweep()
    error = await refused(waiting)
    assert (error.code, error.extra["clock"]) == ("expired", "active")


async def test_active_expiry_counts_waiting_and_acting(bench):
    task_id = (await bench.start(limits={"active": 30.0}))["task_id"]
    for turn in range(2):
        bench.time.advance(14.0)
        await bench.act(task_id, turn)
    bench.time.advance(2.0)
    error = await refused(bench.act(task_id, 2))
    assert error.extra["clock"] == "active"


async def test_start_expiry_cancels_the_start_and_frees_the_slot(bench, eventually):
    waiting = asyncio.create_task(bench.start("a", start_s=60.0))
    await eventually(lambda: any(e.tasks for e in bench.runtime.launched.values()), "the server starts it")
    bench.time.advance(31.0)
    await bench.service.sweep()
    error = await refused(waiting)
    assert (error.code, error.extra["clock"]) == ("expired", "start")
    # One start that hangs is no matter for the others.
    assert (await bench.start("b"))["turn"] == 0


async def test_an_end_that_hangs_is_over_at_its_limit_and_the_server_is_condemned(benches, eventually):
    bench = await benches.open(capacity=1)
    task_id = (await bench.start("a", end_s=60.0, limits={"end": 0.05}))["task_id"]
    account = await bench.end(task_id)
    assert (account["outcome"]["kind"], account["reward"]) == ("aborted", None)
    await eventually(lambda: swept(bench, num_servers=0), "the only server of a hanging task is killed")
    assert (await bench.start("b"))["turn"] == 0
    assert len(bench.runtime.launched) == 2


async def test_a_condemned_server_lives_until_its_other_tasks_are_over(benches, eventually):
    bench = await benches.open(capacity=4)
    good = (await bench.start("good"))["task_id"]
    bad = (await bench.start("bad", end_s=60.0, limits={"end": 0.05}))["task_id"]
    await bench.end(bad)
    assert (await bench.act(good, 0))["turn"] == 1
    await bench.start("new")
    assert len(bench.runtime.launched) == 2
    await bench.end(good)
    await eventually(lambda: swept(bench, num_servers=1), "the condemned server is gone")


async def test_a_paused_tasks_clocks_stand_still(bench):
    task_id = (await bench.start())["task_id"]
    bench.time.advance(5.0)
    paused = await bench.pause(task_id, 1)
    bench.time.advance(1e6)
    await bench.service.sweep()
    assert (await refused(bench.act(task_id, 0))).code == "paused"
    resumed = await bench.resume(task_id, 2)
    assert resumed["clocks"] == paused["clocks"]
    assert resumed["clocks"]["idle"]["remaining_s"] == pytest.approx(15.0)
    assert (await bench.act(task_id, 0))["turn"] == 1


async def test_the_server_hears_of_pauses_in_order_and_before_the_next_action(bench):
    task_id = (await bench.start())["task_id"]
    for epoch in range(1, 21, 2):
        await bench.pause(task_id, epoch)
        await bench.resume(task_id, epoch + 1)
    assert (await bench.act(task_id, 0))["turn"] == 1
    (environment,) = bench.runtime.launched.values()
    (task,) = environment.tasks.values()
    assert task.paused is False


async def test_a_pause_while_acting_answers_pausing_and_holds_after_the_action(bench, eventually):
    task_id = (await bench.start(step_s=0.05))["task_id"]
    acting = asyncio.create_task(bench.act(task_id, 0))
    await eventually(lambda: bench.effects() == 1, "the action runs")
    assert (await bench.pause(task_id, 1))["state"] == "pausing"
    assert (await acting)["turn"] == 1
    assert await bench.state(task_id) == "paused"
    (environment,) = bench.runtime.launched.values()
    await eventually(lambda: all(task.paused for task in environment.tasks.values()), "the server is told")
    assert (await bench.pause(task_id, 1))["state"] == "paused"
    assert (await bench.end(task_id))["outcome"]["kind"] == "aborted"


async def test_a_server_that_still_thinks_the_task_paused_is_told_before_the_action_counts(bench):
    task_id = (await bench.start())["task_id"]
    (environment,) = bench.runtime.launched.values()
    (task,) = environment.tasks.values()
    task.paused = True
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1


async def test_a_release_that_could_not_be_written_is_tried_again(bench, monkeypatch):
    task_id = (await bench.start(turns=1, reward=0.5))["task_id"]
    commit = bench.service.committer.commit

    async def failing(change):
        if change.after.released:
            monkeypatch.setattr(bench.service.committer, "commit", commit)
            raise OSError("disk full")
        await commit(change)

    monkeypatch.setattr(bench.service.committer, "commit", failing)
    await bench.act(task_id, 0)
    await asyncio.wait({bench.service._registry.lives[task_id].releasing})
    account = await bench.end(task_id)
    assert (account["reward"], account["outcome"]["kind"]) == (0.5, "completed")
    assert await bench.taken() == 0


async def test_pause_of_a_done_task_answers_done(bench):
    task_id = (await bench.start(turns=1))["task_id"]
    await bench.act(task_id, 0)
    assert (await bench.pause(task_id, 1))["state"] == "done"
    assert (await refused(bench.act(task_id, 1))).code == "state_conflict"


async def test_a_restart_goes_on_with_what_lives_and_charges_no_outage(benches, eventually):
    bench = await benches.open()
    waiting = (await bench.start("a"))["task_id"]
    await bench.act(waiting, 0)
    bench.time.advance(1.0)
    await bench.service.sweep()
    await benches.crash(bench)
    benches.time.advance(10_000.0)
    bench = await benches.open()
    account = await bench.act(waiting, 1)
    assert account["info"]["effects"] == 2
    assert account["clocks"]["active"]["consumed_s"] == pytest.approx(1.0)
    assert await bench.taken() == 1
    assert len(bench.runtime.launched) == 1


async def test_a_restart_ends_the_tasks_whose_servers_are_gone(benches, eventually):
    bench = await benches.open()
    waiting = (await bench.start("a"))["task_id"]
    done = (await bench.start("b", turns=1))["task_id"]
    await bench.act(done, 0)
    await bench.end(done)
    await benches.crash(bench, servers_too=True)
    bench = await benches.open()
    await eventually(bench.freed, "its keeper finds out")
    account = await bench.end(waiting)
    assert (account["reward"], account["outcome"]["reason"]) == (None, "environment_lost")
    assert (await refused(bench.act(waiting, 0))).code == "ended"
    assert (await bench.end(done))["reward"] == 1.0
    assert await bench.repository.open_tasks() == []
    await eventually(lambda: swept(bench, num_servers=0), "no row is left")
    assert await bench.repository.instances.all() == []


async def test_a_task_done_but_not_released_at_the_crash_has_no_reward(benches, eventually):
    bench = await benches.open()
    task_id = (await bench.start(turns=1, end_s=60.0))["task_id"]
    await bench.act(task_id, 0)
    await benches.crash(bench, servers_too=True)
    account = await (await benches.open()).end(task_id)
    assert (account["reward"], account["outcome"]["reason"]) == (None, "environment_lost")


async def test_a_task_done_but_not_released_at_the_crash_is_released_after_it(benches):
    bench = await benches.open()
    task_id = (await bench.start(turns=1, end_s=0.2))["task_id"]
    await bench.act(task_id, 0)
    await benches.crash(bench)
    account = await (await benches.open()).end(task_id)
    assert (account["reward"], account["outcome"]["kind"]) == (1.0, "completed")


async def test_a_stop_ends_everything_and_answers_everyone(benches, eventually):
    bench = await benches.open()
    hanging = (await bench.start("a", hang_turn=0))["task_id"]
    waiting = asyncio.create_task(bench.act(hanging, 0))
    await eventually(lambda: bench.effects() == 1, "the action runs")
    await bench.service.stop(drain_s=0.01)
    assert (await refused(waiting)).code == "unavailable"
    assert (await refused(bench.start("b"))).code == "unavailable"
    assert bench.runtime.servers == {}
    assert await bench.repository.open_tasks() == []


async def swept(bench, *, num_servers: int) -> bool:
    """After a sweep: so many servers live."""
    await bench.service.sweep()
    return len(bench.runtime.servers) == num_servers
