"""Exactly-once turns, on the fake runtime."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk.codec import same
from tide_sdk.errors import TideError


async def refused(call) -> TideError:
    with pytest.raises(TideError) as caught:
        await call
    return caught.value


async def test_g26_a_duplicate_in_flight_joins_and_acts_once(bench, eventually):
    task_id = (await bench.start(step_s=0.05))["task_id"]
    answers = await asyncio.gather(*(bench.act(task_id, 0) for _ in range(20)))
    assert {answer["info"]["effects"] for answer in answers} == {1}
    assert bench.effects() == 1
    assert all(answer["turn"] == 1 for answer in answers)


async def test_a_duplicate_in_flight_with_another_body_is_refused(bench, eventually):
    task_id = (await bench.start(hang_turn=0))["task_id"]
    running = asyncio.create_task(bench.act(task_id, 0, "left"))
    await eventually(lambda: bench.effects() == 1, "the action runs")
    assert (await refused(bench.act(task_id, 0, "right"))).code == "turn_conflict"
    await bench.end(task_id)
    assert (await refused(running)).code == "ended"


async def test_an_answered_turn_is_answered_from_the_store_also_after_the_end(bench):
    task_id = (await bench.start(turns=2))["task_id"]
    first = await bench.act(task_id, 0)
    assert (await bench.act(task_id, 1))["terminated"] is True
    assert (await bench.end(task_id))["reward"] == 1.0
    again = await bench.act(task_id, 0)
    assert {**again, "clocks": 0} == {**first, "clocks": 0}
    assert (await refused(bench.act(task_id, 0, "other"))).code == "turn_conflict"
    assert (await refused(bench.act(task_id, 2))).code == "ended"


async def test_an_answered_turn_is_in_the_store_of_the_next_gateway_too(benches):
    bench = await benches.open()
    task_id = (await bench.start())["task_id"]
    first = await bench.act(task_id, 0)
    await benches.crash(bench)
    again = await (await benches.open()).act(task_id, 0)
    assert again["messages"] == first["messages"]


async def test_turns_out_of_order_are_refused(bench):
    task_id = (await bench.start())["task_id"]
    error = await refused(bench.act(task_id, 1))
    assert (error.code, error.extra["turn"]) == ("turn_order", 0)


async def test_a_caller_that_goes_away_does_not_stop_the_action(bench, eventually):
    task_id = (await bench.start(step_s=0.05))["task_id"]
    caller = asyncio.create_task(bench.act(task_id, 0))
    await eventually(lambda: bench.effects() == 1, "the action runs")
    caller.cancel()
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1


async def test_a_broken_connection_sends_again_to_the_same_incarnation_only(bench):
    task_id = (await bench.start(drop_turn=0))["task_id"]
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1
    assert bench.effects() == 1


async def test_a_broken_connection_is_never_sent_again_to_another_incarnation(bench):
    task_id = (await bench.start(drop_turn=0))["task_id"]
    (environment,) = bench.runtime.launched.values()
    environment.incarnation = "restarted behind the same address"
    assert (await refused(bench.act(task_id, 0))).code == "environment_lost"
    assert environment.keys.keys() == {f"{task_id}/0"}
    assert (await bench.end(task_id))["reward"] is None


async def test_a_server_that_dies_after_it_acted_loses_the_task_and_never_acts_again(bench, eventually):
    task_id = (await bench.start(die_turn=1))["task_id"]
    other = (await bench.start("other"))["task_id"]
    await bench.act(task_id, 0)
    assert (await refused(bench.act(task_id, 1))).code == "environment_lost"
    account = await bench.end(task_id)
    assert account["reward"] is None
    assert account["outcome"]["kind"] == "failed"
    assert account["outcome"]["reason"] == "environment_lost"

    async def over() -> bool:
        return await bench.state(other) != "waiting"

    await eventually(over, "the server's other task is lost too")
    lost = await bench.end(other)
    assert (lost["reward"], lost["outcome"]["reason"]) == (None, "environment_lost")
    # A new server takes the place of the dead one.
    assert (await bench.act((await bench.start("new"))["task_id"], 0))["info"]["effects"] == 1
    assert len(bench.runtime.launched) == 2


@pytest.mark.parametrize("fault", [{"fail_turn": 0}, {"garbage_turn": 0}])
async def test_a_broken_environment_ends_the_task_without_reward(bench, fault):
    task_id = (await bench.start(**fault))["task_id"]
    assert (await refused(bench.act(task_id, 0))).code == "environment_failed"
    account = await bench.end(task_id)
    assert (account["reward"], account["outcome"]["reason"]) == (None, "environment_failed")
    assert await bench.taken() == 0


async def test_a_result_that_cannot_be_written_is_asked_for_again_and_acts_once(bench, monkeypatch):
    task_id = (await bench.start())["task_id"]
    commit = bench.service.committer.commit

    async def failing(change):
        if change.result is not None:
            monkeypatch.setattr(bench.service.committer, "commit", commit)
            raise OSError("disk full")
        await commit(change)

    monkeypatch.setattr(bench.service.committer, "commit", failing)
    assert (await refused(bench.act(task_id, 0))).code == "unavailable"
    assert (await refused(bench.act(task_id, 0, "other"))).code == "turn_conflict"
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1
    assert (await bench.act(task_id, 1))["info"]["effects"] == 2


async def test_the_latest_observation_can_be_read_again_without_effect(bench):
    started = await bench.start(text_bytes=20_000)
    task_id = started["task_id"]
    import json

    first = json.loads(await bench.service.latest("local", task_id))
    assert (first["turn"], first["messages"], first["reward"]) == (0, started["messages"], None)
    answer = await bench.act(task_id, 0)
    latest = json.loads(await bench.service.latest("local", task_id))
    assert {**latest, "clocks": 0} == {**answer, "clocks": 0}
    await bench.pause(task_id)
    assert json.loads(await bench.service.latest("local", task_id))["turn"] == 1
    await bench.end(task_id)
    assert (await refused(bench.service.latest("local", task_id))).code == "ended"


async def test_large_bodies_are_files_and_small_ones_rows(bench, benches):
    task_id = (await bench.start(text_bytes=50_000))["task_id"]
    await bench.act(task_id, 0, "x" * 50_000)
    # The first observation and the turn's answer differ, the action is a third body.
    files = [path for path in (benches.folder / "blobs").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert (await bench.act(task_id, 0, "x" * 50_000))["messages"][0]["content"] == "o" * 50_000


def test_json_bodies_are_compared_as_values():
    assert same({"a": 1, "b": [1.0]}, {"b": [1], "a": 1.0})
    assert not same({"a": True}, {"a": 1})
    assert not same({"a": None}, {})
    assert not same([1, 2], [2, 1])
    assert not same({"a": []}, {"a": {}})


async def test_a_callers_reason_is_not_taken_for_a_replaced_attempt(bench):
    task_id = (await bench.start())["task_id"]
    await bench.end(task_id, reason="superseded")
    assert (await refused(bench.act(task_id, 0))).code == "ended"
