"""Restarts under traffic, lost engines, caps under concurrency, start rates, port races, honest refusals."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from functools import partial

import pytest
from awkward_table import awkward_table
from gateway_cluster import GatewayCluster, scripted
from load_driver import Load, drive
from load_report import Report
from replica_client import ReplicaClient

from tide_sdk.codec import dumps, loads
from tide_sdk.errors import TideError
from tide_sdk.http import LeanClient

NUM_STARTS = 200
CAP = 16


def clean(report: Report, num_tasks: int) -> bool:
    """Every task came to its own end: none lost, doubled or ended by the infrastructure."""
    return (report.finished, report.faults, report.infrastructure) == (num_tasks, 0, {})


@pytest.mark.parametrize("keep", [False, True], ids=["killed", "stopped"])
@pytest.mark.postgres
async def test_g15_a_restart_under_traffic_loses_no_call_and_no_timer(tmp_path, fresh_databases, eventually, keep):
    with (
        fresh_databases.fresh("postgres") as url,
        GatewayCluster(tmp_path, url, {"scripted": scripted(capacity=32)}, keep=keep) as cluster,
    ):
        await asyncio.to_thread(cluster.start_all)
        async with ReplicaClient(cluster.urls) as client:

            async def begin(key: str, **limits: float) -> str:
                body = {"environment": "scripted", "key": key, "task": {}, "limits": {"idle": 60.0} | limits}
                return (await client.post("/start", body)).data["task_id"]

            async def clocks(task_id: str) -> dict:
                return (await client.get(f"/tasks/{task_id}")).data["clocks"]

            paused, waiting, forgotten = await begin("paused"), await begin("waiting"), await begin("late", idle=3.0)
            await client.post("/pause", {"task_id": paused, "epoch": 1})
            before = {task_id: await clocks(task_id) for task_id in (paused, waiting)}
            asked_s = asyncio.get_running_loop().time()
            load = Load(tasks=16, turns=6, think_s=0.2, repeat=0.2, pause=0.2, pause_s=0.05, script={"step_s": 0.05})
            report = Report()
            driving = asyncio.create_task(drive(cluster.urls, load, report))
            for share in (0.2, 0.6):
                wanted = share * load.tasks * load.turns
                await eventually(lambda wanted=wanted: report.turns >= wanted, "the load runs")
                await asyncio.to_thread(partial(cluster.restart, 0, kill=not keep))
            await driving
            assert clean(report, 16), str(report)
            assert sum(report.retries.values()) > 0, "the restarts were not under traffic"

            after = {task_id: await clocks(task_id) for task_id in (paused, waiting)}
            passed_s = asyncio.get_running_loop().time() - asked_s
            assert {name: clock["consumed_s"] for name, clock in after[paused].items()} == {
                name: clock["consumed_s"] for name, clock in before[paused].items()
            }
            idle_s = after[waiting]["idle"]["consumed_s"] - before[waiting]["idle"]["consumed_s"]
            assert 0.0 < idle_s <= passed_s + 0.1
            # Nobody calls for it, and yet its clock runs out.

            async def is_over() -> bool:
                return (await client.get(f"/tasks/{forgotten}")).data["state"] in ("ending", "ended")

            await eventually(is_over, "its clock has run out")
            assert (await client.get(f"/tasks/{forgotten}")).data["outcome"]["clock"] == "idle"
            for task_id in (paused, waiting):
                await client.post("/end", {"task_id": task_id})


async def test_g15_whatever_is_asked_of_a_gateway_that_stops_is_answered_at_once(benches, eventually):
    """The turn and the end may be under way, or come when nothing is waited for any more."""
    bench, calls = await benches.open(), []
    tasks = [(await bench.start(f"k{number}", hang_turn=0, end_s=60.0))["task_id"] for number in range(3)]
    calls.append(asyncio.create_task(bench.act(tasks[0], 0)))
    await eventually(lambda: all_in(bench, tasks[:1], "acting"), "the turn is under way")
    stopping = asyncio.create_task(bench.service.stop(drain_s=0.0, keep=True))
    await eventually(lambda: bench.service._registry.closed, "the stop has begun")
    for _ in range(20):
        calls += [asyncio.create_task(bench.act(task_id, 0)) for task_id in tasks]
        calls += [asyncio.create_task(bench.end(task_id)) for task_id in tasks]
        calls += [asyncio.create_task(bench.start(f"k{number}", hang_turn=0, end_s=60.0)) for number in range(4)]
        await asyncio.sleep(0)
    done, pending = await asyncio.wait(calls, timeout=5.0)
    assert not pending
    assert {getattr(call.exception(), "code", None) for call in done} <= {None, "unavailable"}
    await stopping


async def test_g15_a_turn_whose_end_cannot_be_written_is_answered(bench, monkeypatch):
    task_id = (await bench.start(fail_turn=0))["task_id"]
    commit = bench.service.committer.commit

    async def full(change):
        if change.after.outcome is not None:
            raise OSError("disk full")
        await commit(change)

    monkeypatch.setattr(bench.service.committer, "commit", full)
    async with asyncio.timeout(5):
        with pytest.raises(TideError, match="unavailable"):
            await bench.act(task_id, 0)
    monkeypatch.undo()
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1


@pytest.mark.postgres
async def test_g17_starts_at_two_replicas_never_exceed_the_cap(tmp_path, fresh_databases):
    """By the environment servers' own count, which would take more: slow starts and slow ends hold their slots."""
    letters = tmp_path / "letters"
    table = awkward_table(
        "Logged", set={"file": str(letters), "slow_s": 0.03}, capacity=CAP, servers=2, own_capacity=4 * CAP
    )
    with (
        fresh_databases.fresh("postgres") as url,
        GatewayCluster(tmp_path, url, {"logged": table}, replicas=2) as cluster,
    ):
        await asyncio.to_thread(cluster.start_all)
        waiting, started, num_started = set(range(NUM_STARTS)), [], 0
        async with LeanClient(cluster.urls[0], max_in_flight=256) as one, LeanClient(cluster.urls[1]) as two:

            async def start(number: int) -> None:
                body = {"environment": "logged", "key": f"k{number}", "task": {}}
                answer = await (one, two)[number % 2].request("POST", "/start", dumps(body), timeout_s=30.0)
                if answer.status == 201:
                    waiting.remove(number)
                    started.append(loads(answer.body)["task_id"])
                else:
                    assert answer.status == 429, answer.body

            async def end(task_id: str) -> None:
                body = {"task_id": task_id}
                assert (await one.request("POST", "/end", dumps(body), timeout_s=30.0)).status == 200

            # All at once, and each further time while those of before end.
            while num_started < 3 * CAP:
                ending, started = started, []
                await asyncio.gather(*map(start, waiting), *map(end, ending))
                num_started += len(started)
            await asyncio.gather(*map(end, started))
    taken = list(itertools.accumulate(1 if letter == "+" else -1 for letter in letters.read_text()))
    assert (len(taken), taken[-1]) == (2 * num_started, 0)
    assert max(taken) == CAP


@pytest.mark.parametrize("limit", ["capacity", "owner_capacity"])
async def test_g17_slots_are_counted_from_before_the_launch_until_the_servers_end(benches, eventually, limit):
    values = {"capacity": 64, limit: 4}
    one, two = await benches.open(**values), await benches.open(**values)
    one.runtime.launch_s = two.runtime.launch_s = 0.1
    starts = [bench.start(f"k{number}", end_s=0.1) for number in range(32) for bench in (one, two)]
    answers = await asyncio.gather(*starts, return_exceptions=True)
    task_ids = {answer["task_id"] for answer in answers if isinstance(answer, dict)}
    refusals = {answer.extra["reason"] for answer in answers if isinstance(answer, TideError)}
    assert (len(task_ids), refusals) == (4, {limit})
    ending = asyncio.gather(*(one.end(task_id) for task_id in task_ids))
    await eventually(lambda: all_in(one, task_ids, "ending"), "all are ending")
    with pytest.raises(TideError):
        await two.start("next")
    await ending
    one.time.advance(3600.0)  # nobody who was refused waits any more
    assert (await two.start("next"))["turn"] == 0


async def all_in(bench, task_ids, state: str) -> bool:
    return {await bench.state(task_id) for task_id in task_ids} == {state}


async def test_g18_the_start_rate_is_apart_from_the_capacity(benches):
    values = {"capacity": 1000, "start_rate": 2.0, "start_burst": 3}
    one, two = await benches.open(**values), await benches.open(**values)
    refused: list[tuple[float, str]] = []
    reasons: set[str] = set()
    for number in range(8):
        one.time.advance(0.001)
        try:
            await (one, two)[number % 2].start(f"k{number}")
        except TideError as error:
            reasons.add(error.extra["reason"])
            refused.append((one.time.now_s() + error.extra["retry_after_s"], f"k{number}"))
    assert reasons == {"rate"}
    assert await one.taken() == 3
    # Exactly when, and each for itself.
    assert [at_s - refused[0][0] for at_s, _ in refused] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0], abs=1e-4)
    for number, (at_s, key) in enumerate(refused):
        one.time.advance(at_s - one.time.now_s() - 0.01)
        with pytest.raises(TideError):
            await two.start(key)
        one.time.advance(0.01001)
        await one.start(key)
        assert await one.taken() == 4 + number
    # A repeated start is no new one.
    assert (await two.start("k0"))["turn"] == 0


async def test_g19_parallel_starts_with_a_server_each_do_not_race_for_ports(tmp_path):
    num = 40
    table = awkward_table(
        "Logged", place="port", set={"file": str(tmp_path / "letters"), "slow_s": 0}, capacity=num, servers=num,
        limits={"start": 100.0},
    )  # fmt: skip
    with GatewayCluster(tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", {"logged": table}) as cluster:
        await asyncio.to_thread(cluster.start_all)
        body = {"environment": "logged", "task": {}}
        async with LeanClient(cluster.urls[0], max_in_flight=num) as client:
            starts = [
                client.request("POST", "/start", dumps(body | {"key": f"k{n}"}), timeout_s=100) for n in range(num)
            ]
            answers = await asyncio.gather(*starts)
        assert [answer.status for answer in answers] == [201] * num
        assert sorted(cluster.listed().values()) == [1] * num


async def test_g20_waiting_as_told_costs_little_also_after_a_quiet_time(benches):
    """Ten callers that do exactly what they are told share two slots, each for a second of the manual clock."""
    bench = await benches.open(capacity=2)
    began_s = bench.time.now_s()
    due = [(began_s + 0.001 * number, number, "") for number in range(10)]
    started_s: dict[int, float] = {}
    while due:
        at_s, number, task_id = heapq.heappop(due)
        bench.time.advance(max(0.0, at_s - bench.time.now_s()))
        if task_id:
            await bench.end(task_id)
            continue
        try:
            task_id = (await bench.start(f"k{number}"))["task_id"]
        except TideError as error:
            heapq.heappush(due, (at_s + error.extra["retry_after_s"], number, ""))
        else:
            started_s[number] = at_s - began_s
            heapq.heappush(due, (at_s + 1.0, number, task_id))
    # The last two begin after four seconds at the earliest.
    assert max(started_s.values()) <= 3 * 4.0, started_s


async def test_g20_a_client_that_waits_as_told_gets_in(tmp_path):
    """Over HTTP, with nothing but the header or the body to go by."""
    tables = {"scripted": scripted(capacity=2)}
    with GatewayCluster(tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", tables) as cluster:
        await asyncio.to_thread(cluster.start_all)
        refusals: dict[int, int] = {}

        async def play(client: LeanClient, number: int) -> None:
            body = {"environment": "scripted", "key": f"k{number}", "task": {}}
            refusals[number] = 0
            while True:
                response = await client.request("POST", "/start", dumps(body))
                if response.status == 201:
                    break
                refusals[number] += 1
                assert response.status == 429, response.body
                told_s = loads(response.body)["retry_after_s"]
                header_s = int(response.headers["retry-after"])
                assert header_s == max(1, math.ceil(told_s))
                # Half of the callers know the header only.
                await asyncio.sleep(told_s if number % 2 else header_s)
            await asyncio.sleep(0.1)
            ended = await client.request(
                "POST", "/end", dumps({"task_id": loads(response.body)["task_id"]}), timeout_s=10.0
            )
            assert ended.status == 200

        async with LeanClient(cluster.urls[0]) as client, asyncio.timeout(60):
            await asyncio.gather(*(play(client, number) for number in range(6)))
        assert sum(refusals.values()) >= 4
        # The first two get in at once; that nobody is told a moment that means nothing is what the bound is for.
        assert max(refusals.values()) <= 6, refusals
