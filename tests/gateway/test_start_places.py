"""Where a start takes place is in its first row already, and the account that is waited for is in its last one."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tide_gateway.repository import slots
from tide_gateway.repository.choice import Instance, InstanceState, chosen
from tide_gateway.repository.slots import KeyTaken
from tide_gateway.specs import EnvironmentSpec


async def test_a_start_beside_others_is_one_transaction_before_its_server_is_called(bench, monkeypatch):
    await bench.start("a")

    async def refuse(*_args, **_named):
        raise AssertionError("it was placed with its first row")

    monkeypatch.setattr(bench.repository.instances, "place", refuse)
    monkeypatch.setattr(bench.repository.instances, "get", refuse)
    monkeypatch.setattr(bench.repository, "newest_attempt", refuse)
    task_id = (await bench.start("b"))["task_id"]
    (server,) = await bench.repository.instances.all()
    assert ((await bench.repository.task(task_id)).instance, server.served) == (server.name, 2)
    assert [kind for kind, _, _ in await bench.repository.events_of(task_id)] == ["starting", "started"]


async def test_a_start_whose_server_changes_meanwhile_is_placed_anew(bench, monkeypatch):
    await bench.start("a")
    stale = []

    def older(instance):
        stale.append(instance.name)
        return {"of": instance.name, "known": instance.version - 1, "served": 9, "version": instance.version}

    monkeypatch.setattr(slots, "served", older)
    task_id = (await bench.start("b"))["task_id"]
    (server,) = await bench.repository.instances.all()
    assert (stale, server.served) == ([server.name], 2)
    assert (await bench.repository.task(task_id)).instance == server.name
    assert await bench.taken() == 2


async def test_a_server_that_is_condemned_or_full_is_not_given_a_start(benches):
    bench = await benches.open(capacity=2, servers=2)
    await bench.start("a")
    (first,) = await bench.repository.instances.all()
    await bench.repository.instances.condemn(first.name, "of a test")
    other = (await bench.repository.task((await bench.start("b"))["task_id"])).instance
    assert other not in ("", first.name)


async def test_an_attempt_that_the_caller_does_not_know_is_not_passed_over(bench, monkeypatch):
    await bench.start("a")
    rows, asked = bench.repository.slots, []
    admit = rows.admit

    async def note(*args, **named):
        asked.append(named["known"])
        try:
            return await admit(*args, **named)
        except KeyTaken:
            asked.append("taken")
            raise

    monkeypatch.setattr(rows, "admit", note)
    await bench.start("a", attempt=3)
    assert asked == [-1, "taken", 0]
    assert await bench.taken() == 1


async def test_an_end_that_waits_for_the_release_is_written_with_it(bench):
    task_id = (await bench.start(turns=1, end_s=0.1))["task_id"]
    await bench.act(task_id, 0)
    before = bench.service.committer.num_changes
    accounts = await asyncio.gather(*(bench.end(task_id) for _ in range(3)))
    assert bench.service.committer.num_changes == before + 1
    assert accounts[0]["outcome"]["kind"] == "completed"
    again = await bench.end(task_id)
    assert all({**account, "clocks": 0} == {**again, "clocks": 0} for account in accounts)
    kinds = [kind for kind, _, _ in await bench.repository.events_of(task_id)]
    assert kinds == ["starting", "started", "done", "released", "ended"]


async def test_an_account_that_nobody_waits_for_is_kept_until_it_is_read(bench, eventually):
    task_id = (await bench.start(turns=1))["task_id"]
    await bench.act(task_id, 0)
    await eventually(bench.freed, "the environment has let it go")
    assert await bench.state(task_id) == "done"
    assert (await bench.end(task_id))["outcome"]["kind"] == "completed"
    assert await bench.state(task_id) == "ended"


@pytest.mark.parametrize(
    ("load", "servers", "may_launch", "new"),
    [(0, 2, True, False), (1, 2, True, True), (1, 2, False, False), (1, 1, True, False)],
)
def test_an_empty_server_beats_a_new_one_and_that_a_busy_one(load, servers, may_launch, new):
    spec = EnvironmentSpec(name="e", runtime="fake", capacity=4, servers=servers)
    row = Instance("e-0", "e", "fake", "me", InstanceState.READY, 0, 2, 0.0)
    found, better_new = chosen(spec, [row], Counter({"e-0": load}), may_launch=may_launch)
    assert (found, better_new) == (row, new)
