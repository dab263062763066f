"""Limits of an environment and of a start, and late attempts: lines G6 and G7 of the list of faults."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk.errors import TideError

DEFAULT = {"start": 25.0, "idle": 26.0, "turn": 27.0, "active": 28.0, "end": 4.5}
MINE_S = 7.25


async def refused(call) -> TideError:
    with pytest.raises(TideError) as caught:
        await call
    return caught.value


def limits_of(answer: dict) -> dict[str, float]:
    return {name: clock["limit_s"] for name, clock in answer["clocks"].items()}


def chosen(by: str, limits: dict[str, float]) -> tuple[dict, dict]:
    """The environment's limits, and those of the start."""
    return (DEFAULT | limits, {}) if by == "environment" else (DEFAULT, limits)


@pytest.fixture(params=["environment", "start"])
def by(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("clock", [*DEFAULT])
async def test_g06_every_limit_is_told_in_every_answer(benches, clock, by):
    wanted = DEFAULT | {clock: MINE_S}
    spec, limits = chosen(by, {clock: MINE_S})
    bench = await benches.open(limits=spec)
    started = await bench.start(limits=limits)
    task_id = started["task_id"]
    assert started["limits"] == limits_of(started) == wanted
    assert limits_of(await bench.act(task_id, 0)) == wanted
    assert limits_of(await bench.pause(task_id, 1)) == wanted
    assert limits_of(await bench.resume(task_id, 2)) == wanted
    view = (await bench.service.task("local", task_id)).model_dump(mode="json")
    assert limits_of(view) == limits_of(await bench.start(limits=limits)) == wanted
    assert limits_of(await bench.end(task_id)) == wanted


@pytest.mark.parametrize("clock", ["start", "idle", "turn", "active"])
async def test_g06_every_limit_holds(benches, eventually, clock, by):
    spec, limits = chosen(by, {clock: MINE_S})
    bench = await benches.open(limits=spec)
    script = {"start": {"start_s": 60.0}, "turn": {"hang_turn": 0}}.get(clock, {})
    waiting = asyncio.create_task(bench.start(limits=limits, **script))
    if clock == "start":
        await eventually(lambda: any(e.tasks for e in bench.runtime.launched.values()), "the server starts it")
    else:
        task_id = (await waiting)["task_id"]
    if clock == "turn":
        waiting = asyncio.create_task(bench.act(task_id, 0))
        await eventually(lambda: bench.effects() == 1, "the action runs")
    for passed_s, expired in ((MINE_S - 0.01, None), (0.02, clock)):
        bench.time.advance(passed_s)
        await bench.service.sweep()
        (view,) = await bench.service.tasks("local", limit=9, after=None, state=None, environment=None)
        assert (view.outcome and view.outcome.clock) == expired
    await asyncio.gather(waiting, return_exceptions=True)


async def test_g06_the_limit_of_the_end_holds(benches, by):
    spec, limits = chosen(by, {"end": 0.05})
    bench = await benches.open(limits=spec)
    task_id = (await bench.start(limits=limits, end_s=3600.0))["task_id"]
    account = await bench.end(task_id)
    assert (account["reward"], limits_of(account)["end"]) == (None, 0.05)


async def test_g06_a_slow_set_up_has_the_time_that_was_asked_for(benches, by):
    # The launch is part of the start: no constant, nor the environment's own limit, cuts a longer one short.
    spec, limits = chosen(by, {"start": 60.0})
    bench = await benches.open(limits=spec | ({"start": 0.05} if by == "start" else {}))
    bench.runtime.launch_s = 0.3
    assert (await bench.start(limits=limits))["turn"] == 0


@pytest.mark.parametrize("name", [*DEFAULT])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_g06_a_limit_that_is_none_is_refused_and_named(gateway, name, value):
    body = f'{{"environment": "scripted", "key": "k", "limits": {{"{name}": {value}}}}}'
    body = body.replace("inf", "1e999").replace("nan", '"NaN"')
    with gateway.client() as client:
        answer = client.post("/start", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert f"limits.{name}" in str(answer.json().get("field", "")) or "body" in answer.json()["field"]


@pytest.mark.parametrize("state", ["waiting", "paused", "ended", "expired", "failed", "done"])
async def test_g07_a_late_answer_is_stale_however_the_older_attempt_was_over(bench, eventually, state):
    script = {"turns": 1} if state == "done" else {"fail_turn": 0} if state == "failed" else {}
    old = (await bench.start(**script))["task_id"]
    turn = 0
    if state == "paused":
        await bench.pause(old, 1)
    elif state == "ended":
        await bench.end(old)
    elif state == "expired":
        bench.time.advance(1000.0)
        await bench.service.sweep()
    elif state in ("failed", "done"):
        await asyncio.gather(bench.act(old, 0), return_exceptions=True)
        turn = 1
    new = (await bench.start(attempt=1, **script))["task_id"]
    assert new != old
    for _ in range(2):
        error = await refused(bench.act(old, turn))
        assert (error.status, error.code) == (409, "stale_attempt")
    for attempt in (None, 0):
        error = await refused(bench.start(attempt=attempt, **script))
        assert (error.status, error.code) == (409, "stale_attempt")
    assert (await bench.end(old))["turns"] == (1 if state == "done" else 0)
    assert await bench.state(new) == "waiting"
    if state == "done":
        assert (await bench.act(old, 0))["terminated"] is True  # what was answered is still told


async def test_g07_a_late_answer_in_flight_is_stale_and_the_newer_attempt_goes_on(bench, eventually):
    old = (await bench.start(step_s=0.2))["task_id"]
    late = asyncio.create_task(bench.act(old, 0))
    await eventually(lambda: bench.effects() == 1, "the action runs")
    new = (await bench.start(attempt=3, step_s=0.2))["task_id"]
    assert (await refused(late)).code == "stale_attempt"
    assert (await bench.act(new, 0))["info"]["effects"] == 1


async def test_g07_a_start_in_flight_of_a_replaced_attempt_is_stale(bench, eventually):
    late = asyncio.create_task(bench.start(start_s=0.3))
    await eventually(lambda: any(e.tasks for e in bench.runtime.launched.values()), "the server starts it")
    new = (await bench.start(attempt=1, start_s=0.3))["task_id"]
    assert (await refused(late)).code == "stale_attempt"
    assert await bench.state(new) == "waiting"


async def test_g07_the_next_gateway_knows_the_stale_attempt_too(benches):
    bench = await benches.open()
    old = (await bench.start())["task_id"]
    new = (await bench.start(attempt=1))["task_id"]
    await benches.crash(bench)
    bench = await benches.open()
    assert (await refused(bench.act(old, 0))).code == "stale_attempt"
    assert (await bench.act(new, 0))["turn"] == 1


@pytest.mark.postgres
@pytest.mark.parametrize("in_flight", [False, True], ids=["later", "in-flight"])
async def test_g07_another_replica_knows_the_stale_attempt_too(
    fresh_databases, benches_class, tmp_path, eventually, in_flight
):
    with fresh_databases.fresh("postgres") as url:
        benches = benches_class(url, tmp_path)
        here, there = await benches.open(), await benches.open()
        script = {"hang_turn": 0} if in_flight else {}
        old = (await here.start(**script))["task_id"]
        late = asyncio.create_task(here.act(old, 0)) if in_flight else None
        if late is not None:
            await eventually(lambda: here.effects() == 1, "the action runs")
        new = (await there.start(attempt=1, **script))["task_id"]
        if late is not None:
            await here.service.sweep()
            assert (await refused(late)).code == "stale_attempt"
        for bench in (here, there):
            assert (await refused(bench.act(old, 0))).code == "stale_attempt"
            assert (await refused(bench.start(**script))).code == "stale_attempt"
            assert await bench.state(new) == "waiting"
        await benches.close()
