"""Keys, attempts, capacity, and starts that fail."""

from __future__ import annotations

import asyncio
import json

import pytest

from tide_sdk.errors import TideError
from tide_sdk.wire import StartRequest


async def refused(call) -> TideError:
    with pytest.raises(TideError) as caught:
        await call
    return caught.value


def tasks_on_servers(bench) -> int:
    return sum(len(environment.tasks) for environment in bench.runtime.launched.values())


async def test_the_same_key_is_the_same_start(bench):
    answers = await asyncio.gather(*(bench.start("a", start_s=0.02) for _ in range(10)))
    assert len({answer["task_id"] for answer in answers}) == 1
    assert await bench.taken() == 1
    later = await bench.start("a", start_s=0.02)
    assert later["messages"] == answers[0]["messages"]
    assert (await bench.start("a", owner="another", start_s=0.02))["task_id"] != later["task_id"]


async def test_a_repeated_start_gets_the_first_answer_even_after_the_end(bench):
    first = await bench.start("a")
    await bench.end(first["task_id"])
    again = await bench.start("a")
    assert {**again, "clocks": 0} == {**first, "clocks": 0}


async def test_a_key_with_another_body_is_refused(bench):
    await bench.start("a", turns=1)
    error = await refused(bench.start("a", turns=2))
    assert (error.code, error.extra["field"]) == ("key_conflict", "key")


async def test_an_absent_field_equals_its_default(bench):
    first = (await bench.start("a"))["task_id"]
    body = {"environment": "scripted", "key": "a", "task": {}}
    for defaults in ({"attempt": 0}, {"kind": "train", "seed": None}, {"split": None, "limits": None}):
        repeated = body | defaults
        answer = await bench.service.start("local", StartRequest.model_validate(repeated), repeated)
        assert json.loads(answer)["task_id"] == first


async def test_g07_a_higher_attempt_ends_the_older_one_whose_late_turn_is_stale(bench, eventually):
    old = (await bench.start("a"))["task_id"]
    await bench.act(old, 0)
    new = (await bench.start("a", attempt=1))["task_id"]
    assert new != old
    assert (await refused(bench.act(old, 1))).code == "stale_attempt"
    assert (await bench.act(old, 0))["turn"] == 1
    assert (await refused(bench.start("a"))).code == "stale_attempt"
    assert (await bench.end(old))["outcome"] == {"kind": "aborted", "clock": None, "reason": "superseded"}
    await eventually(lambda: tasks_on_servers(bench) == 1, "the older attempt is released")
    assert (await bench.act(new, 0))["turn"] == 1


async def test_a_turn_in_flight_of_a_replaced_attempt_is_stale(bench, eventually):
    old = (await bench.start("a", hang_turn=0))["task_id"]
    late = asyncio.create_task(bench.act(old, 0))
    await eventually(lambda: bench.effects() == 1, "the action runs")
    await bench.start("a", attempt=5, hang_turn=0)
    assert (await refused(late)).code == "stale_attempt"


async def test_the_cap_holds_under_concurrency_and_counts_starting_tasks(benches):
    bench = await benches.open(capacity=8, servers=2)
    outcomes = await asyncio.gather(*(bench.start(f"k{i}", start_s=0.02) for i in range(100)), return_exceptions=True)
    codes = [outcome.code for outcome in outcomes if isinstance(outcome, TideError)]
    assert codes == ["capacity"] * 92
    assert tasks_on_servers(bench) == 8
    assert [tasks for _, _, tasks in await bench.service.servers()] == [4, 4]


async def test_a_burst_of_starts_does_not_keep_their_server_from_becoming_ready(benches):
    bench = await benches.open(capacity=100, servers=1)
    async with asyncio.timeout(20):
        started = await asyncio.gather(*(bench.start(f"k{number}") for number in range(100)))
    assert len(started) == tasks_on_servers(bench) == 100
    assert len(bench.runtime.launched) == 1


async def test_a_refused_start_leaves_no_row_and_may_be_repeated(benches):
    bench = await benches.open(capacity=1)
    held = (await bench.start("a"))["task_id"]
    error = await refused(bench.start("b"))
    assert (error.code, error.extra["retry_after_s"]) == ("capacity", 1)
    await bench.end(held)
    assert (await bench.start("b"))["turn"] == 0


async def test_an_ending_task_holds_its_slot_until_it_is_released(benches, eventually):
    bench = await benches.open(capacity=1)
    held = (await bench.start("a", end_s=1.0))["task_id"]
    ending = asyncio.create_task(bench.end(held))
    await eventually(lambda: bench.service._registry.lives[held].task.state == "ending", "it ends")
    assert (await refused(bench.start("b"))).code == "capacity"
    await ending
    assert (await bench.start("b"))["turn"] == 0


async def test_a_done_task_gives_its_slot_back_before_it_is_read(benches, eventually):
    bench = await benches.open(capacity=1)
    task_id = (await bench.start("a", turns=1, reward=0.25))["task_id"]
    await bench.act(task_id, 0)
    await eventually(bench.freed, "the slot is back")
    assert await bench.state(task_id) == "done"
    await bench.start("b")
    assert (await bench.end(task_id))["reward"] == 0.25
    assert (await bench.end(task_id))["reward"] == 0.25


async def test_g10_a_server_that_does_not_launch_fails_the_start_and_leaves_nothing(bench, eventually):
    bench.runtime.num_failures = 1
    error = await refused(bench.start("a"))
    assert (error.code, "fails to launch" in error.detail) == ("environment_failed", True)
    assert (await refused(bench.start("a"))).code == "environment_failed"
    await eventually(bench.freed, "the slot is back")
    # Until the pause between launches is over, starts are refused before they leave a row.
    error = await refused(bench.start("b"))
    assert (error.code, error.extra["retry_after_s"] >= 1) == ("unavailable", True)
    bench.service.fleets["scripted"].launches.not_before_s = 0.0
    assert (await bench.start("b"))["turn"] == 0


async def test_an_environment_that_refuses_the_parameters_is_quoted(bench, eventually):
    error = await refused(bench.start("a", refuse=True))
    assert error.code == "invalid"
    assert "refuses to start" in error.detail
    assert (await refused(bench.start("a", refuse=True))).code == "invalid"
    await eventually(bench.freed, "the slot is back")


async def test_a_start_can_be_ended_while_it_starts_and_leaves_nothing(bench, eventually):
    caller = asyncio.create_task(bench.start("a", start_s=0.2))
    await eventually(lambda: tasks_on_servers(bench) == 1, "the server starts it")
    task_id = (await bench.service.tasks("local", limit=1, after=None, state=None, environment=None))[0].task_id
    account = await bench.end(task_id, "changed my mind")
    assert account["outcome"] == {"kind": "aborted", "clock": None, "reason": "changed my mind"}
    assert (await refused(caller)).code == "ended"
    assert tasks_on_servers(bench) == 0
    assert await bench.taken() == 0


async def test_an_unknown_environment_names_the_known_ones(bench):
    from tide_sdk.wire import StartRequest

    body = {"environment": "nope", "key": "k"}
    error = await refused(bench.service.start("local", StartRequest.model_validate(body), body))
    assert (error.code, "scripted" in error.detail) == ("environment_unknown", True)


async def test_another_owners_task_does_not_exist(bench):
    task_id = (await bench.start())["task_id"]
    for call in (bench.act(task_id, 0, owner="eve"), bench.end(task_id, owner="eve"), bench.act("nope", 0)):
        assert (await refused(call)).code == "not_found"


async def test_g14_ten_rounds_leave_memory_as_it_was(bench):
    for number in range(50):
        task_id = (await bench.start(f"k{number}", turns=1))["task_id"]
        await bench.act(task_id, 0)
        await bench.end(task_id)
    assert bench.service._registry.lives == {}
    assert bench.service._starts._keys._locks == {}
    assert bench.service._registry._background == set()
