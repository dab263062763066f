"""What is counted, exactly: on a manual clock, and where the counting could go wrong."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tide_gateway.instruments import Counter, Histogram
from tide_gateway.loop_lag import watch_lag
from tide_gateway.metrics import Metrics, reason_of
from tide_gateway.repository import Conflict
from tide_gateway.rows import Change
from tide_gateway.runtimes.fake import FakeRuntime
from tide_sdk.clocks import ClockName
from tide_sdk.errors import TideError
from tide_sdk.wire import Outcome


def written(collector) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_histogram_is_written_as_prometheus_reads_it():
    histogram = Histogram("h_seconds", "words", "call", bounds=(0.1, 1.0))
    for value in (0.1, 0.2, 5.0):
        histogram.of("turn").observe(value)
    assert written(histogram) == {
        ("h_seconds_bucket", "turn", "0.1"): 1,  # a bound belongs to its bucket
        ("h_seconds_bucket", "turn", "1.0"): 2,
        ("h_seconds_bucket", "turn", "+Inf"): 3,
        ("h_seconds_count", "turn"): 3,
        ("h_seconds_sum", "turn"): pytest.approx(5.3),
    }


def test_a_label_may_have_any_text():
    counter = Counter("c_total", "words", "path", "status")
    counter.add('/a"b\\c\n', 200)
    counter.add('/a"b\\c\n', 200, by=0.5)
    assert written(counter)["c_total", '/a"b\\c\n', "200"] == 1.5


def test_a_callers_own_words_are_no_label():
    reasons = [
        reason_of(Outcome(kind="aborted", reason="the moon is full")),
        reason_of(Outcome(kind="aborted", reason="owner_lost")),
        reason_of(Outcome(kind="failed", reason="environment_lost")),
        reason_of(Outcome(kind="expired", clock=ClockName.IDLE)),
        reason_of(Outcome(kind="expired", reason="max_wall_s")),
        reason_of(Outcome(kind="completed")),
    ]
    assert reasons == ["caller", "owner_lost", "environment_lost", "idle", "max_wall_s", ""]


async def test_pauses_are_counted_when_they_are_over_by_a_resume_or_by_the_end(bench):
    first, second = (await bench.start("a"))["task_id"], (await bench.start("b"))["task_id"]
    await bench.pause(first)
    await bench.pause(second)
    bench.time.advance(7.0)
    assert written(bench.service.metrics)["tide_gateway_paused_seconds_total", "scripted"] == 0
    await bench.resume(first)
    bench.time.advance(5.0)
    await bench.end(second)
    assert written(bench.service.metrics)["tide_gateway_paused_seconds_total", "scripted"] == 19.0


async def test_a_census_counts_the_rows_of_all_replicas(benches):
    first, second = await benches.open(capacity=2), await benches.open(capacity=2)
    one, _ = (await first.start("a"))["task_id"], (await second.start("b"))["task_id"]
    with pytest.raises(TideError):
        await second.start("c")
    await first.pause(one)
    benches.time.advance(1.0)
    census = await second.repository.census.count(benches.time.now_s())
    assert census.tasks == {("scripted", "paused"): 1, ("scripted", "waiting"): 1}
    assert census.left_s["scripted"] == pytest.approx(19.0), "of 20 s idle"
    assert (census.taken, census.waiting) == ({"scripted": 2}, {"scripted": 1})
    assert sum(census.instances.values()) == len(benches.world.names())
    assert written(second.service.metrics)["tide_gateway_starts_refused_total", "scripted", "capacity"] == 1


async def test_a_write_that_another_replica_was_faster_for_is_counted_as_a_conflict(bench):
    task_id = (await bench.start("a"))["task_id"]
    task = await bench.repository.task(task_id)
    with pytest.raises(Conflict):
        await bench.service.committer.commit(Change(task))
    assert written(bench.service.metrics)["tide_gateway_commit_failures_total", "conflict"] == 1


async def test_what_exists_without_a_row_is_counted_when_it_is_destroyed(bench):
    await FakeRuntime(bench.runtime.world).launch("orphan", 0, bench.service.environments["scripted"], 5.0)
    await bench.service.sweep()
    assert written(bench.service.metrics)["tide_gateway_orphans_removed_total", "fake"] == 1


async def test_a_blocked_loop_is_seen_by_its_monitor(caplog):
    metrics = Metrics()
    watching = asyncio.create_task(watch_lag(metrics.lag.of().observe, interval_s=0.01, warn_s=0.1))
    for _ in range(3):
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251 (that is what the monitor is for)
    await asyncio.sleep(0.02)
    watching.cancel()
    found = written(metrics)
    assert found["tide_gateway_event_loop_lag_seconds_sum",] >= 0.5
    assert caplog.text.count("the event loop stood still") == 1, "not each time"
