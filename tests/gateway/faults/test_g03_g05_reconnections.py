"""Reconnections and sub-second limits: lines G3 and G5 of the list of faults."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from fresh_databases import kind_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tide_sdk.errors import TideError
from tide_sdk.wire import EpochRequest

OVER = ("ending", "ended")
EPOCH_S = 1_700_000_000.0
LIMITS = {"start": 30.0, "idle": 1000.0, "turn": 10.0, "active": 5000.0, "end": 5.0}


async def refused(call) -> TideError:
    with pytest.raises(TideError) as caught:
        await call
    return caught.value


async def listed(bench) -> None:
    await bench.service.tasks("local", limit=10, after=None, state=None, environment=None)


async def stale_epoch(bench, task_id: str, *, paused: bool) -> None:
    epoch = (await bench.service.task("local", task_id)).epoch
    if epoch:
        request = EpochRequest(task_id=task_id, epoch=epoch)
        await (bench.service.pause if paused else bench.service.resume)("local", request)


async def repeat_turn(bench, task_id: str) -> None:
    turn = (await bench.service.task("local", task_id)).turn
    if turn:
        await bench.act(task_id, turn - 1)


async def refused_turn(bench, task_id: str) -> None:
    await refused(bench.act(task_id, 1000))


RECONNECTIONS = {
    "observation": lambda bench, task_id: bench.service.latest("local", task_id),
    "task": lambda bench, task_id: bench.service.task("local", task_id),
    "history": lambda bench, task_id: bench.service.history("local", task_id),
    "capacity": lambda bench, task_id: bench.service.slots("local"),
    "list": lambda bench, task_id: listed(bench),
    "start": lambda bench, task_id: bench.start(),
    "start-with-attempt-0": lambda bench, task_id: bench.start(attempt=0),
    "sweep": lambda bench, task_id: bench.service.sweep(),
    "heartbeat": lambda bench, task_id: bench.service.heartbeat("local", "", 1e4),
    "stale-pause": lambda bench, task_id: stale_epoch(bench, task_id, paused=True),
    "stale-resume": lambda bench, task_id: stale_epoch(bench, task_id, paused=False),
    "turn-again": repeat_turn,
    "turn-out-of-order": refused_turn,
}
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from([*RECONNECTIONS, "reconnect-to-the-next-gateway", "pause", "resume", "turn"]),
        st.floats(0.0, 10.0),
    ),
    min_size=5,
    max_size=20,
)


class Expected:
    """Idle and active seconds as the agent counts them: those in which the task was not paused."""

    def __init__(self) -> None:
        self.idle_s = self.active_s = 0.0
        self.epoch = self.turn = 0
        self.paused = False

    def passes(self, seconds: float) -> None:
        self.idle_s += 0.0 if self.paused else seconds
        self.active_s += 0.0 if self.paused else seconds


async def follow(benches, operations: list[tuple[str, float]]) -> None:
    benches.time.advance(EPOCH_S - benches.time.now_s())
    bench = await benches.open(limits=LIMITS)
    task_id, expected = (await bench.start())["task_id"], Expected()
    for operation, passed_s in operations:
        benches.time.advance(passed_s)
        expected.passes(passed_s)
        if operation in RECONNECTIONS:
            before = await bench.repository.task(task_id)
            await RECONNECTIONS[operation](bench, task_id)
            assert await bench.repository.task(task_id) == before  # its row's version, too
        elif operation == "turn":
            if not expected.paused:
                await bench.act(task_id, expected.turn)
                expected.turn, expected.idle_s = expected.turn + 1, 0.0
        elif operation in ("pause", "resume"):
            expected.epoch, expected.paused = expected.epoch + 1, operation == "pause"
            await (bench.pause if expected.paused else bench.resume)(task_id, expected.epoch)
            await settled(bench)
        else:
            await bench.service.sweep()
            await benches.crash(bench)
            benches.time.advance(10 * LIMITS["active"])
            bench = await benches.open(limits=LIMITS)
        await check(bench, task_id, expected)
    if expected.paused:
        await bench.resume(task_id)
    benches.time.advance(LIMITS["idle"] - expected.idle_s - 0.01)
    await bench.service.sweep()
    assert await bench.state(task_id) == "waiting"
    benches.time.advance(0.02)
    await bench.service.sweep()
    assert await bench.state(task_id) in OVER


async def settled(bench) -> None:
    """The environment has been told of the pause, which is a commit of its own."""
    async with asyncio.timeout(20):
        while background := bench.service._registry._background:
            await asyncio.wait(background)


async def check(bench, task_id: str, expected: Expected) -> None:
    view = await bench.service.task("local", task_id)
    assert {name: clock.limit_s for name, clock in view.clocks.items()} == LIMITS
    assert view.clocks["idle"].consumed_s == pytest.approx(expected.idle_s, abs=1e-4)
    assert view.clocks["active"].consumed_s == pytest.approx(expected.active_s, abs=1e-4)
    assert view.clocks["turn"].consumed_s == 0.0
    assert (view.turn, view.epoch) == (expected.turn, expected.epoch)
    assert view.state == ("paused" if expected.paused else "waiting")


@pytest.mark.parametrize("kind", kind_params())
def test_g03_whoever_reconnects_changes_no_limit_and_no_counter(fresh_databases, benches_class, kind):
    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(OPERATIONS)
    def holds(operations: list[tuple[str, float]]) -> None:
        with tempfile.TemporaryDirectory() as folder, fresh_databases.fresh(kind) as url, asyncio.Runner() as runner:
            benches = benches_class(url, Path(folder))
            try:
                runner.run(follow(benches, operations))
            finally:
                runner.run(benches.close())

    holds()


@pytest.mark.parametrize("state", ["acting", "pausing", "paused", "done"])
@pytest.mark.parametrize("operation", [name for name in RECONNECTIONS if name not in ("turn-again", "sweep")])
async def test_g03_in_every_state(bench, eventually, state, operation):
    task_id = (await bench.start(turns=1, **({"step_s": 60.0} if state in ("acting", "pausing") else {})))["task_id"]
    acting = None
    if state == "paused":
        await bench.pause(task_id, 1)
        await settled(bench)
    elif state == "done":
        await bench.act(task_id, 0)
        await settled(bench)
    else:
        acting = asyncio.create_task(bench.act(task_id, 0))
        await eventually(lambda: bench.effects() == 1, "the action runs")
        await (bench.pause(task_id, 1) if state == "pausing" else asyncio.sleep(0))
    bench.time.advance(3.0)
    before = await bench.repository.task(task_id)
    assert before.state == state
    if operation.startswith("start"):
        await refused(bench.start(turns=2))  # another start under the same key
    else:
        await RECONNECTIONS[operation](bench, task_id)
    assert await bench.repository.task(task_id) == before
    if acting is not None:
        await bench.end(task_id)  # the action was there to be looked at, not to be waited for
        assert (await refused(acting)).code == "ended"


POLLS = ["observation", "task", "list", "start"]


@pytest.mark.parametrize("clock", ["idle", "active"])
async def test_g05_a_fifth_of_a_second_holds_and_a_thousand_polls_extend_nothing(bench, clock):
    bench.time.advance(EPOCH_S - bench.time.now_s())
    limits = {clock: 0.2}
    task_id = (await bench.start(limits=limits))["task_id"]
    for number in range(1000):
        bench.time.advance(0.199 / 1000)
        poll = POLLS[number % len(POLLS)]
        await (bench.start(limits=limits) if poll == "start" else RECONNECTIONS[poll](bench, task_id))
    await bench.service.sweep()
    assert await bench.state(task_id) == "waiting"
    bench.time.advance(0.0011)
    error = await refused(bench.service.latest("local", task_id))
    assert (error.status, error.extra["clock"]) == (410, clock)


@pytest.mark.parametrize("seconds", [0.001, 0.2, 0.75, 59.5, 61.0, 90.5])
async def test_g05_no_limit_is_rounded(bench, seconds):
    task_id = (await bench.start(limits={"idle": seconds, "active": 1000.0}))["task_id"]
    bench.time.advance(seconds - 0.0005)
    await bench.service.sweep()
    assert await bench.state(task_id) == "waiting"
    bench.time.advance(0.001)
    await bench.service.sweep()
    assert await bench.state(task_id) in OVER


@pytest.mark.parametrize("cap", ["max_wall_s", "max_pause_s"])
async def test_g05_no_cap_is_rounded(benches, cap):
    bench = await benches.open(**{cap: 0.2})
    task_id = (await bench.start())["task_id"]
    await bench.pause(task_id, 1)
    bench.time.advance(0.199)
    await bench.service.sweep()
    assert await bench.state(task_id) == "paused"
    bench.time.advance(0.002)
    await bench.service.sweep()
    assert await bench.state(task_id) in OVER
