"""How a run begins and ends in odd moments; no process is started here: what would be wired is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tide_trainer import cli, run
from tide_trainer.errors import ConfigurationError
from tide_trainer.report.metrics import MetricsFailed, MetricsLog
from tide_trainer.settings import TrainerSettings
from tide_trainer.usage import Usage


class Parts:
    """What a run needs of its wired parts."""

    parity_max_abs = None

    def __init__(self, body):
        self._body = body

    async def run(self, *, only_warm_start):
        return await self._body()

    def usage(self):
        return Usage({}, 0)

    def progress(self):
        return {}


@pytest.fixture
def settings(tmp_path):
    return TrainerSettings.model_validate(
        {
            "run": {"directory": str(tmp_path / "runs")},
            "tasks": {"environment": "toy"},
            "rollout": {"engine": "fake"},
            "train": {"backend": "fake"},
        }
    )


@pytest.fixture
def body(monkeypatch):
    """Sets what the run does once it is wired."""

    def use(coroutine_function):
        @asynccontextmanager
        async def wired(*_, **__):
            yield Parts(coroutine_function)

        monkeypatch.setattr(run, "wired", wired)

    return use


async def done():
    return "done"


def end_record(folder: Path):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


async def test_a_signal_in_the_middle_of_the_end_does_not_tear_it(settings, body, monkeypatch, tmp_path):
    body(done)
    began, go_on = asyncio.Event(), asyncio.Event()
    drop = run.RunRepository.drop_unfinished

    async def slowly(self, reason):
        began.set()
        await go_on.wait()
        return await drop(self, reason)

    monkeypatch.setattr(run.RunRepository, "drop_unfinished", slowly)
    running = asyncio.create_task(run.run(settings))
    await asyncio.wait_for(began.wait(), 20)
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.wait_for(running, 20) == 0
    folder = tmp_path / "runs" / "run"
    assert end_record(folder)["status"] == "completed"
    assert (folder / "report.html").is_file()
    with sqlite3.connect(folder / "trainer.sqlite3") as database:
        assert database.execute("select status from runs").fetchall() == [("completed",)]


async def test_a_disk_that_fills_up_ends_the_run_as_failed_with_its_account_and_report(
    settings, body, monkeypatch, tmp_path
):
    def full(self, line):
        if b'"phase":"stopping"' in line:
            raise MetricsFailed("metrics.jsonl: cannot be written (No space left on device)")
        return append(self, line)

    append = MetricsLog._append
    monkeypatch.setattr(MetricsLog, "_append", full)
    body(done)
    assert await run.run(settings) == 1
    folder = tmp_path / "runs" / "run"
    assert "No space left" in end_record(folder)["reason"]
    assert (folder / "report.html").is_file()


async def test_a_report_that_cannot_be_written_hides_neither_the_account_nor_the_failure(
    settings, body, monkeypatch, tmp_path
):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "write_report", full)
    body(done)
    assert await run.run(settings) == 1
    assert end_record(tmp_path / "runs" / "run")["status"] == "completed"


async def test_the_end_tells_what_a_turn_cost(settings, monkeypatch, capsys):
    @asynccontextmanager
    async def wired(_settings, _directory, _repository, record, _keep_samples, **_):
        async def body():
            cpu_s = {"main": 0.5, "router": 0.3, "gateway": 0.6, "engine": 1.0}
            record("train_step", model_version=1, num_turns=1000, scheduler_cpu_s=0.1, cpu_s=cpu_s)
            return "done"

        yield Parts(body)

    monkeypatch.setattr(run, "wired", wired)
    assert await run.run(settings) == 0
    told = "CPU of a turn: scheduler 0.10 + router 0.30 + gateway 0.60 = 1.00 ms (goal: at most 2); engine 1.00, main"
    assert told in capsys.readouterr().out


async def test_two_runs_of_a_name_in_one_database_are_refused_by_name(settings, body, tmp_path):
    body(done)
    shared = {"database_url": f"sqlite:///{tmp_path / 'shared.sqlite3'}"}
    first = settings.model_copy(update={"run": settings.run.model_copy(update=shared)})
    assert await run.run(first) == 0
    elsewhere = {**shared, "directory": str(tmp_path / "other")}
    second = settings.model_copy(update={"run": settings.run.model_copy(update=elsewhere)})
    with pytest.raises(ConfigurationError, match=r"run\.database_url: .*'run'.*another run\.name"):
        await run.run(second)


def test_only_the_first_signal_stops_the_run_and_later_ones_do_not_tear_its_end(capsys):
    ends = []

    async def running():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(20)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.05)
            ends.append("whole")

    assert cli._to_the_end(running()) == cli.EXIT_INTERRUPTED
    assert ends == ["whole"]
    assert "stopping already" in capsys.readouterr().err
