"""Clocks of slow models, pauses, reconnections and hard caps: lines G1 to G4 of the list of faults."""

from __future__ import annotations

import asyncio
import time

import pytest

from tide_sdk.errors import TideError

GO = {"role": "assistant", "content": "go"}
EPOCH_S = 1_700_000_000.0
"""A real moment: two neighbouring floats are 2.4e-7 apart there."""
LIMITS = {"start": 30.0, "idle": 2.0, "turn": 10.0, "active": 100.0, "end": 5.0}


async def refused(call) -> TideError:
    with pytest.raises(TideError) as caught:
        await call
    return caught.value


def remaining(answer: dict) -> dict[str, float]:
    return {name: clock["remaining_s"] for name, clock in answer["clocks"].items()}


@pytest.fixture
async def slow(benches):
    """A service whose agents may think for two seconds."""
    benches.time.advance(EPOCH_S - benches.time.now_s())
    return await benches.open(limits=LIMITS)


@pytest.fixture
async def pair(fresh_databases, benches_class, tmp_path):
    """Two replicas on one PostgreSQL database, and what opens more."""
    with fresh_databases.fresh("postgres") as url:
        benches = benches_class(url, tmp_path)
        benches.time.advance(EPOCH_S - benches.time.now_s())
        yield [await benches.open(limits=LIMITS), await benches.open(limits=LIMITS)], benches
        await benches.close()


@pytest.mark.parametrize("swept", [False, True], ids=["found-by-the-call", "found-by-the-sweep"])
@pytest.mark.parametrize("turn", [0, 1], ids=["first-turn", "second-turn"])
async def test_g01_an_agent_that_thinks_too_long_unpaused_is_told_so(slow, swept, turn):
    task_id = (await slow.start())["task_id"]
    if turn:
        slow.time.advance(1.5)
        await slow.act(task_id, 0)
    slow.time.advance(10.0)
    if swept:
        await slow.service.sweep()
    for call in (slow.act(task_id, turn), slow.service.latest("local", task_id), slow.pause(task_id, 1)):
        error = await refused(call)
        assert (error.status, error.code, error.extra["clock"]) == (410, "expired", "idle")
    account = await slow.end(task_id)
    assert account["outcome"] == {"kind": "expired", "clock": "idle", "reason": None}
    assert account["metrics"] == {"effects": turn}


@pytest.mark.parametrize("freeze", [False, True], ids=["running", "frozen"])
async def test_g01_an_agent_that_thinks_too_long_paused_goes_on(benches, freeze):
    bench = await benches.open(limits=LIMITS, servers=16, freeze=freeze)
    task_id = (await bench.start())["task_id"]
    for turn in range(3):
        bench.time.advance(0.5)
        await bench.pause(task_id, 2 * turn + 1)
        bench.time.advance(10.0)
        await bench.service.sweep()
        resumed = await bench.resume(task_id, 2 * turn + 2)
        assert resumed["clocks"]["idle"]["consumed_s"] == pytest.approx(0.5, abs=1e-6)
        bench.time.advance(1.25)
        view = await bench.service.task("local", task_id)
        assert view.clocks["idle"].consumed_s == pytest.approx(1.75, abs=1e-6)
        answer = await bench.act(task_id, turn)
        assert answer["turn"] == turn + 1
        assert answer["clocks"]["active"]["consumed_s"] == pytest.approx(1.75 * (turn + 1), abs=1e-6)


def test_g01_over_http_and_in_real_time(gateway):
    with gateway.client() as client:

        def start(key: str) -> str:
            body = {"environment": "scripted", "key": key, "limits": {"idle": 2.0}}
            return client.post("/start", json=body).json()["task_id"]

        held, left = start("held"), start("left")
        assert client.post("/pause", json={"task_id": held, "epoch": 1}).json()["state"] == "paused"
        deadline_s = time.monotonic() + 20
        while client.get(f"/tasks/{left}").json()["state"] != "ended" and time.monotonic() < deadline_s:
            time.sleep(0.02)
        answer = client.post("/observation", json={"task_id": left, "turn": 0, "message": GO})
        assert (answer.status_code, answer.json()["code"], answer.json()["clock"]) == (410, "expired", "idle")
        resumed = client.post("/resume", json={"task_id": held, "epoch": 2}).json()
        assert resumed["clocks"]["idle"]["consumed_s"] < 2.0
        client.post("/pause", json={"task_id": held, "epoch": 3})
        client.post("/resume", json={"task_id": held, "epoch": 4})
        client.post("/end", json={"task_id": held})


@pytest.mark.parametrize("freeze", [False, True], ids=["running", "frozen"])
async def test_g02_fifty_long_pauses_take_nothing(benches, freeze):
    benches.time.advance(EPOCH_S - benches.time.now_s())
    bench = await benches.open(limits=LIMITS, servers=16, freeze=freeze)
    task_id = (await bench.start())["task_id"]
    bench.time.advance(1.5)
    before = remaining(await bench.pause(task_id, 1))
    for number in range(50):
        bench.time.advance(3 * LIMITS["idle"])
        await bench.service.sweep()
        resumed = await bench.resume(task_id, 2 * number + 2)
        assert remaining(resumed) == before  # to the last bit: the clocks that stand still are not computed anew
        assert remaining(await bench.pause(task_id, 2 * number + 3)) == before
    bench.time.advance(3 * LIMITS["active"])
    assert remaining(await bench.resume(task_id)) == before
    assert (await bench.act(task_id, 0))["turn"] == 1


async def test_g02_fifty_pauses_with_time_between_do_not_drift(slow):
    task_id = (await slow.start())["task_id"]
    for number in range(50):
        slow.time.advance(0.03)
        await slow.pause(task_id, 2 * number + 1)
        slow.time.advance(3 * LIMITS["idle"])
        await slow.resume(task_id, 2 * number + 2)
    clocks = (await slow.service.task("local", task_id)).clocks
    assert clocks["idle"].remaining_s == pytest.approx(0.5, abs=1e-4)
    assert clocks["active"].remaining_s == pytest.approx(98.5, abs=1e-4)


async def test_g02_pauses_that_come_while_the_environment_acts(slow, eventually):
    task_id = (await slow.start(step_s=0.3))["task_id"]
    for turn in range(10):
        acting = asyncio.create_task(slow.act(task_id, turn))
        await eventually(lambda turn=turn: slow.effects() == turn + 1, "the action runs")
        assert (await slow.pause(task_id, 2 * turn + 1))["state"] == "pausing"
        slow.time.advance(1.0)  # acting goes on, and counts
        answer = await acting
        assert await slow.state(task_id) == "paused"
        slow.time.advance(3 * LIMITS["active"])
        resumed = await slow.resume(task_id, 2 * turn + 2)
        assert remaining(resumed) == remaining(answer)
        assert resumed["clocks"]["idle"]["consumed_s"] == 0.0
        assert resumed["clocks"]["active"]["consumed_s"] == pytest.approx(turn + 1.0, abs=1e-4)


async def test_g02_pauses_that_span_a_crash(benches):
    benches.time.advance(EPOCH_S - benches.time.now_s())
    bench = await benches.open(limits=LIMITS)
    task_id = (await bench.start())["task_id"]
    bench.time.advance(1.5)
    before = remaining(await bench.pause(task_id, 1))
    for number in range(10):
        bench.time.advance(3 * LIMITS["idle"])
        await benches.crash(bench)
        benches.time.advance(3 * LIMITS["active"])
        bench = await benches.open(limits=LIMITS)
        assert remaining(await bench.resume(task_id, 2 * number + 2)) == before
        assert remaining(await bench.pause(task_id, 2 * number + 3)) == before
    await bench.resume(task_id)
    assert (await bench.act(task_id, 0))["turn"] == 1


@pytest.mark.postgres
async def test_g02_pauses_here_and_resumes_there(pair):
    (here, there), _ = pair
    task_id = (await here.start())["task_id"]
    here.time.advance(1.5)
    before = remaining(await there.pause(task_id, 1))
    for number in range(50):
        here.time.advance(3 * LIMITS["idle"])
        if number % 10 == 0:
            await here.service.sweep()
            await there.service.sweep()
        assert remaining(await here.resume(task_id, 2 * number + 2)) == before
        assert remaining(await there.pause(task_id, 2 * number + 3)) == before
        here, there = there, here
    await here.resume(task_id)
    assert (await there.act(task_id, 0))["turn"] == 1


CAPS = [("max_wall_s", {"max_wall_s": 50.0}), ("max_pause_s", {"max_pause_s": 40.0})]


async def past_the_cap(bench, task_id: str, *, swept: bool) -> None:
    bench.time.advance(10.0)
    await bench.pause(task_id, 1)
    bench.time.advance(39.9)
    await bench.service.sweep()
    assert await bench.state(task_id) == "paused"
    bench.time.advance(0.2)
    if swept:
        await bench.service.sweep()
        assert await bench.state(task_id) in ("ending", "ended")


@pytest.mark.parametrize("swept", [False, True], ids=["found-by-the-call", "found-by-the-sweep"])
@pytest.mark.parametrize(("cap", "options"), CAPS, ids=["max_wall_s", "max_pause_s"])
async def test_g04_a_resume_past_a_hard_cap_does_not_revive(benches, cap, options, swept):
    bench = await benches.open(**options)
    task_id = (await bench.start())["task_id"]
    await past_the_cap(bench, task_id, swept=swept)
    for epoch in (2, 3, None):
        error = await refused(bench.resume(task_id, epoch))
        assert (error.status, error.code, cap in error.detail) == (410, "expired", True)
        assert error.extra["outcome"] == {"kind": "expired", "reason": cap}
    for call in (bench.act(task_id, 0), bench.pause(task_id, 9), bench.service.latest("local", task_id)):
        assert (await refused(call)).status == 410
    assert (await bench.end(task_id))["outcome"] == {"kind": "expired", "clock": None, "reason": cap}
    assert (bench.effects(), await bench.taken()) == (0, 0)


@pytest.mark.parametrize(("cap", "options"), CAPS, ids=["max_wall_s", "max_pause_s"])
async def test_g04_a_restart_does_not_revive_either_and_its_outage_counts_for_nobody(benches, cap, options):
    bench = await benches.open(**options)
    task_id = (await bench.start())["task_id"]
    bench.time.advance(10.0)
    await bench.pause(task_id, 1)
    bench.time.advance(30.0)
    await bench.service.sweep()
    await benches.crash(bench)
    benches.time.advance(1000.0)
    bench = await benches.open(**options)
    bench.time.advance(9.9)
    await bench.service.sweep()
    assert await bench.state(task_id) == "paused"
    bench.time.advance(0.2)
    assert cap in (await refused(bench.resume(task_id, 2))).detail


@pytest.mark.postgres
@pytest.mark.parametrize(("cap", "options"), CAPS, ids=["max_wall_s", "max_pause_s"])
async def test_g04_another_replica_does_not_revive_either(pair, cap, options):
    _, benches = pair
    here, there = await benches.open(**options), await benches.open(**options)
    task_id = (await here.start())["task_id"]
    await past_the_cap(here, task_id, swept=False)
    assert cap in (await refused(there.resume(task_id, 2))).detail
    assert cap in (await refused(here.resume(task_id, 3))).detail


async def test_g04_pauses_do_not_put_off_the_cap_and_turns_do_not_either(benches, eventually):
    bench = await benches.open(max_wall_s=50.0)
    task_id = (await bench.start(hang_turn=4))["task_id"]
    for turn in range(4):
        await bench.pause(task_id, 2 * turn + 1)
        bench.time.advance(12.0)
        await bench.resume(task_id, 2 * turn + 2)
        await bench.act(task_id, turn)
    acting = asyncio.create_task(bench.act(task_id, 4))
    await eventually(lambda: bench.effects() == 5, "the action runs")
    await bench.pause(task_id, 99)
    bench.time.advance(2.1)
    await bench.service.sweep()
    assert (await refused(acting)).status == 410
    assert "max_wall_s" in (await refused(bench.resume(task_id, 100))).detail


async def test_g04_each_pause_has_the_cap_of_its_own(benches):
    bench = await benches.open(max_pause_s=40.0)
    task_id = (await bench.start())["task_id"]
    for number in range(4):
        await bench.pause(task_id, 2 * number + 1)
        bench.time.advance(39.0)
        await bench.service.sweep()
        await bench.resume(task_id, 2 * number + 2)
    assert (await bench.act(task_id, 0))["turn"] == 1
