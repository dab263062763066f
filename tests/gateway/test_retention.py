"""What is over for long goes, whole and in small portions; what lives, or was over only now, stays."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from sqlalchemy import func, select

from tide_gateway.blobs import BlobStore
from tide_gateway.models import EventRow, StartRow, TaskRow, TicketRow, TurnRow
from tide_gateway.repository.retention import RetentionRows
from tide_gateway.service import retention as module
from tide_gateway.service.retention import DAY_S, Files, Retention, remove_logs
from tide_sdk.errors import TideError

BIG = "x" * 20_000
KEEP_S = 7 * DAY_S
YEAR_S = 365 * DAY_S
LONG = {"idle": 30 * DAY_S, "active": 30 * DAY_S}
TABLES = (TaskRow, StartRow, TurnRow, EventRow)


def retention_of(bench, folder: Path, retention_s: float = KEEP_S) -> Retention:
    rows, blobs = RetentionRows(bench.database), BlobStore(folder / "blobs")
    instances = bench.repository.instances
    forget = bench.service.forget
    return Retention(rows, instances, blobs, folder / "logs", bench.time, retention_s, forget=forget)


async def count(bench, table=TaskRow) -> int:
    return await bench.database.read(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one())


def bodies(folder: Path) -> list[Path]:
    return [path for path in (folder / "blobs").glob("??/*") if path.is_file()]


def make_old(*paths: Path, age_s: float = YEAR_S) -> None:
    for path in paths:
        os.utime(path, (time.time() - age_s, time.time() - age_s))


async def play(bench, key: str, turns: int = 2, text: str = "go") -> str:
    task_id = (await bench.start(key))["task_id"]
    for turn in range(turns):
        await bench.act(task_id, turn, text)
    await bench.end(task_id)
    return task_id


async def test_what_is_over_for_long_goes_with_all_its_rows(bench, tmp_path):
    old = await play(bench, "old")
    bench.time.advance(KEEP_S + 1)
    young = await play(bench, "young")
    assert await retention_of(bench, tmp_path).tasks() == 1
    for table in TABLES:
        left = await bench.database.read(lambda c, t=table: set(c.execute(select(t.task_id)).scalars()))
        assert left == {young}
    for call in (bench.act(old, 0), bench.act(old, 1), bench.end(old), bench.service.task("local", old)):
        with pytest.raises(TideError) as refused:
            await call
        assert refused.value.code == "not_found"
    assert (await bench.start("old"))["task_id"] != old, "a key whose task is gone starts anew"


async def test_a_task_that_lives_or_was_over_only_now_stays_however_old_it_is(bench, tmp_path):
    paused = (await bench.start("paused", limits=LONG))["task_id"]
    await bench.pause(paused)
    ended = (await bench.start("ended", limits=LONG))["task_id"]
    bench.time.advance(KEEP_S + 1)
    await bench.end(ended)
    assert await retention_of(bench, tmp_path).tasks() == 0
    assert await count(bench) == 2
    bench.time.advance(KEEP_S + 1)
    assert await retention_of(bench, tmp_path).tasks() == 1
    assert await bench.state(paused) == "paused"


async def test_a_done_task_that_nobody_read_out_goes_too(bench, tmp_path, eventually):
    task_id = (await bench.start("k", turns=1))["task_id"]
    await bench.act(task_id, 0)
    await eventually(bench.freed, "it is released")
    assert await bench.state(task_id) == "done"
    bench.time.advance(KEEP_S + 1)
    assert await retention_of(bench, tmp_path).tasks() == 1
    with pytest.raises(TideError, match="no task"):
        await bench.end(task_id)


async def test_one_transaction_removes_a_bounded_number_of_rows(bench):
    for number in range(6):
        await play(bench, f"k{number}", turns=4)
    long = await play(bench, "long", turns=50)
    restless = (await bench.start("restless"))["task_id"]
    for _ in range(30):
        await bench.pause(restless)
        await bench.resume(restless)
    await bench.end(restless)
    bench.time.advance(DAY_S)
    rows = RetentionRows(bench.database)
    more, most, num_calls, turns_left = True, 0, 0, []
    while more:
        before = sum([await count(bench, table) for table in TABLES])
        more = (await rows.remove_tasks(bench.time.now_s(), max_rows=24)).more
        most = max(most, before - sum([await count(bench, table) for table in TABLES]))
        turns_left.append(await count(bench, TurnRow))
        num_calls += 1
    assert most <= 24 + 8
    assert num_calls >= 6
    assert turns_left[-1] == 0
    assert await count(bench) == 0
    assert any(0 < left < 50 for left in turns_left), f"{long} went in parts"


async def test_a_body_stays_for_as_long_as_any_row_names_it(bench, tmp_path):
    retention = retention_of(bench, tmp_path)
    await play(bench, "first", turns=1, text=BIG)
    await play(bench, "other", turns=1, text="y" + BIG)
    second = (await bench.start("second", limits=LONG))["task_id"]
    await bench.act(second, 0, BIG)
    await bench.pause(second)
    (tmp_path / "blobs" / "aa").mkdir(exist_ok=True)
    part, strange = tmp_path / "blobs" / "aa" / "abc.1234.part", tmp_path / "blobs" / "aa" / "notes"
    part.write_bytes(b"half")
    strange.write_bytes(b"not ours")
    assert len(bodies(tmp_path)) == 4

    bench.time.advance(KEEP_S + 1)
    assert await retention.tasks() == 2
    assert await retention.files() == Files(0, 0), "files touched lately stay"
    make_old(*bodies(tmp_path))
    assert (await retention.files()).bodies == 1
    assert not part.exists()
    assert (await bench.act(second, 0, BIG))["turn"] == 1, "the body that another task names is still read"

    await bench.end(second)
    bench.time.advance(KEEP_S + 1)
    assert await retention.tasks() == 1
    assert (await retention.files()).bodies == 1
    assert bodies(tmp_path) == [strange]


def test_logs_go_with_age_unless_their_server_is_known(tmp_path):
    for name in ("gone-0-a.log", "known-0-b.log", "young-0-c.log", "ray-driver-0.log", "notes.txt"):
        (tmp_path / name).write_text("words")
        if not name.startswith("young"):
            make_old(tmp_path / name)
    assert remove_logs(tmp_path, {"known-0-b"}, KEEP_S) == 1
    assert not (tmp_path / "gone-0-a.log").exists()
    assert len(list(tmp_path.iterdir())) == 4


async def test_places_in_queues_that_ended_long_ago_go(benches, tmp_path):
    bench = await benches.open(capacity=1)
    await bench.start("holds", limits=LONG)
    with pytest.raises(TideError, match="slots"):
        await bench.start("waits")
    assert await count(bench, TicketRow) == 1
    await retention_of(bench, tmp_path).tasks()
    assert await count(bench, TicketRow) == 1
    bench.time.advance(KEEP_S + 100)
    await retention_of(bench, tmp_path).tasks()
    assert await count(bench, TicketRow) == 0


async def test_only_the_replica_that_leads_removes(bench, tmp_path, monkeypatch, eventually):
    await play(bench, "old")
    bench.time.advance(KEEP_S + 1)
    looked = []
    monkeypatch.setattr(module, "TASKS_S", 0.001)
    members = bench.service.members
    monkeypatch.setattr(type(members), "leads", property(lambda self: looked.append(1) or leads))
    leads = False
    running = asyncio.create_task(retention_of(bench, tmp_path).run(members))
    await eventually(lambda: len(looked) > 3, "it looked")
    assert await count(bench) == 1
    leads = True

    async def gone() -> bool:
        return await count(bench) == 0

    await eventually(gone, "the leader removes it")
    running.cancel()


@pytest.fixture
def sqlite_bench(fresh_databases, tmp_path, benches_class):
    with fresh_databases.fresh("sqlite") as url:
        yield benches_class(url, tmp_path)


async def test_a_sqlite_file_does_not_grow_under_churn(sqlite_bench, tmp_path):
    bench = await sqlite_bench.open()
    path = Path(sqlite_bench.url.removeprefix("sqlite:///"))
    sizes = []
    for cycle in range(8):
        for number in range(10):
            await play(bench, f"{cycle}/{number}", turns=3, text="z" * 4000)
        bench.time.advance(KEEP_S + 1)
        assert await retention_of(bench, tmp_path).tasks() == 10
        await bench.database.write(lambda c: c.exec_driver_sql("SELECT 1"))
        sizes.append(await pages_of(bench))
    assert max(sizes[1:]) <= 1.1 * sizes[0], sizes
    await sqlite_bench.close()
    assert await asyncio.to_thread(os.path.getsize, path) <= 1.1 * sizes[0] * 4096


async def pages_of(bench) -> int:
    return await bench.database.read(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar_one())


def test_prune_by_hand_works_beside_a_running_gateway(gateways, capsys, tmp_path):
    from tide_gateway import cli

    gateway = gateways()
    database = f"sqlite:///{tmp_path / 'gateway.db'}"
    with gateway.client() as client:
        start = {"environment": "scripted", "key": "k", "task": {}}
        task_id = client.post("/start", json=start).json()["task_id"]
        body = {"task_id": task_id, "turn": 0, "message": {"role": "assistant", "content": BIG}}
        assert client.post("/observation", json=body).status_code == 200
        assert client.post("/end", json={"task_id": task_id}).status_code == 200
        data = tmp_path / "gateway.db-data"
        make_old(*bodies(data))
        assert cli.main(["prune", "--older-than", "1", "--database", database]) == 0
        assert client.post("/observation", json=body).status_code == 200
        assert cli.main(["prune", "--older-than", "0", "--database", database]) == 0
        assert client.post("/observation", json=body).status_code == 404
        assert bodies(data) == []
        assert client.post("/start", json=start).json()["task_id"] != task_id
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("removed 0 tasks, 0 large")
    assert second.startswith("removed 1 tasks, 1 large")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--older-than", "-1"], "must be 0 to"),
        (["--older-than", "nan"], "must be 0 to"),
        (["--older-than", "1", "--database", "sqlite:///no/such.db"], "no such file"),
    ],
)
def test_a_wrong_prune_is_refused(arguments, words, capsys):
    from tide_gateway import cli

    assert cli.main(["prune", *arguments]) == 2
    assert words in capsys.readouterr().err
