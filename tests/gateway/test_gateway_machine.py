"""Any order of calls over HTTP, of time, replicas and crashes: one action has one effect, answers repeat, slots add up,
clocks keep still. Answers are lost, calls repeated, reordered and raced at several replicas; a crash comes between
calls, or inside one, after any of its commits."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fresh_databases import kind_params
from http_bench import HttpBench, opened
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tide_gateway.database import StorageFailed
from tide_sdk.errors import TideError

KEYS = st.sampled_from("abc")
INDEX = st.integers(0, 63)
WHICH = st.integers(0, 1)
TEXT = st.sampled_from(["go", "stop"])
CALL_LIMIT_S = 30.0
CAPACITY = 2
GONE = ("ended", "expired", "environment_lost", "stale_attempt")


class Known:
    """What the model knows of one task."""

    def __init__(self, key: str, attempt: int) -> None:
        self.key = key
        self.attempt = attempt
        self.answers: dict[int, tuple[str, Any]] = {}
        self.sent: dict[int, set[str]] = {}  # actions whose answer was lost: any of them may have been taken
        self.paused: bool | None = False  # None: an answer was lost, and it may be either
        self.account: dict | None = None

    @property
    def next(self) -> int:
        return max(self.answers, default=-1) + 1


class Machine(RuleBasedStateMachine):
    benches_class: Any
    databases: Any
    kind: str

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tide-test-")
        self.fresh = self.databases.fresh(self.kind, reuse=True)
        self.runner = asyncio.Runner()
        self.benches = self.benches_class(self.fresh.__enter__(), Path(self.folder.name))
        self.num_opened = 0
        self.replicas = [self.do(self.open()) for _ in range(self.num_replicas)]
        self.tasks: dict[str, Known] = {}
        self.attempts: dict[str, int] = {}

    @property
    def num_replicas(self) -> int:
        return 2 if self.kind == "postgres" else 1

    async def open(self) -> HttpBench:
        self.num_opened += 1
        bench = await self.benches.open(capacity=CAPACITY, servers=2)
        return await opened(bench, Path(self.folder.name), self.num_opened)

    def do(self, call) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(CALL_LIMIT_S):
                return await call

        return self.runner.run(bounded())

    def attempt(self, call) -> Any:
        """The call's answer, or its error."""
        try:
            return self.do(call)
        except TideError as error:
            return error

    def at(self, which: int) -> Any:
        return self.replicas[which % len(self.replicas)]

    @rule(key=KEYS, newer=st.booleans(), which=WHICH, lost=st.booleans())
    def start(self, key: str, newer: bool, which: int, lost: bool) -> None:
        attempt = self.attempts.get(key, 0) + (1 if newer and key in self.attempts else 0)
        answer = self.attempt(self.at(which).start(key, attempt=attempt, turns=4, reward=1.0))
        if lost:
            return
        if isinstance(answer, TideError):
            assert answer.code in ("capacity", *GONE), answer
            return
        self.attempts[key] = attempt
        known = self.tasks.setdefault(answer["task_id"], Known(key, attempt))
        assert (known.key, known.attempt) == (key, attempt)

    def pick(self, index: int) -> tuple[str, Known]:
        """A task by the order of the starts: ids are random, and what is drawn must not depend on them."""
        task_id = list(self.tasks)[index % len(self.tasks)]
        return task_id, self.tasks[task_id]

    @rule(index=INDEX, text=TEXT, back=st.integers(-1, 2), which=WHICH, lost=st.booleans())
    def act(self, index: int, text: str, back: int, which: int, lost: bool) -> None:
        if not self.tasks:
            return
        task_id, known = self.pick(index)
        turn = max(0, known.next - back)
        answer = self.attempt(self.at(which).act(task_id, turn, text))
        if lost:
            known.sent.setdefault(turn, set()).add(text)
        else:
            self.judge(known, turn, text, answer)

    @rule(index=INDEX, text=TEXT, epoch=st.integers(1, 9), ends=st.booleans())
    def race(self, index: int, text: str, epoch: int, ends: bool) -> None:
        """The same action three times at once, at all replicas, against a pause and perhaps the end."""
        if not self.tasks:
            return
        task_id, known = self.pick(index)
        turn = known.next
        calls = [self.at(which).act(task_id, turn, text) for which in (0, 1, 1)]
        calls.append(self.at(1).pause(task_id, epoch))
        if ends:
            calls.append(self.at(0).end(task_id))

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(*calls, return_exceptions=True)

        answers = self.do(all_at_once())
        known.sent.setdefault(turn, set()).add(text)
        known.paused = None
        for answer in answers[:3]:
            self.judge(known, turn, text, answer)

    def judge(self, known: Known, turn: int, text: str, answer: Any) -> None:
        if turn in known.answers:
            said, before = known.answers[turn]
            if said == text:
                assert {**answer, "clocks": 0} == before
            else:
                assert answer.code == "turn_conflict"
        elif isinstance(answer, TideError):
            if answer.code == "turn_conflict":
                assert known.sent.get(turn, set()) - {text}
            else:
                assert answer.status in (409, 410, 423, 503), answer
        else:
            assert all(earlier in known.answers or earlier in known.sent for earlier in range(turn))
            assert known.paused is not True or turn in known.sent
            # The one proof that counts: an action that was sent, and sent again, took effect once.
            assert answer["info"]["effects"] == turn + 1
            known.answers[turn] = (text, {**answer, "clocks": 0})

    @rule(index=INDEX, text=TEXT, num_commits=st.integers(0, 2), which=WHICH)
    def act_and_crash(self, index: int, text: str, num_commits: int, which: int) -> None:
        """The replica dies in the call, after so many of its commits; the caller sees nothing of it."""
        if not self.tasks:
            return
        task_id, known = self.pick(index)
        turn, bench = known.next, self.at(which)
        died = dies_after(bench.bench, num_commits)
        answer = self.attempt(until_dead(bench.act(task_id, turn, text), died))
        if answer is None or (isinstance(answer, TideError) and answer.status == 503):
            known.sent.setdefault(turn, set()).add(text)
        elif not isinstance(answer, TideError):
            self.judge(known, turn, text, answer)
        self.crash(which)

    @rule(index=INDEX, epoch=st.integers(1, 9), paused=st.booleans(), which=WHICH)
    def pause_or_resume(self, index: int, epoch: int, paused: bool, which: int) -> None:
        if not self.tasks:
            return
        task_id, known = self.pick(index)
        bench = self.at(which)
        answer = self.attempt((bench.pause if paused else bench.resume)(task_id, epoch))
        known.paused = not isinstance(answer, TideError) and answer["state"] in ("paused", "pausing")

    @rule(index=INDEX, which=WHICH)
    def end(self, index: int, which: int) -> None:
        if not self.tasks:
            return
        task_id, known = self.pick(index)
        account = self.do(self.at(which).end(task_id))
        if known.account is not None:
            assert account == known.account
        known.account, known.paused = account, False
        assert known.next <= account["turns"] <= known.next + 1
        if account["outcome"]["kind"] == "failed":
            assert account["reward"] is None
        if account["outcome"]["kind"] == "completed":
            assert (account["reward"], account["turns"]) == (1.0, 4)

    @rule(seconds=st.sampled_from([0.1, 5.0, 19.0, 25.0]))
    def pass_time(self, seconds: float) -> None:
        self.benches.time.advance(seconds)
        for bench in self.replicas:
            self.do(bench.bench.service.sweep())

    @rule(which=WHICH, servers_too=st.booleans())
    def crash(self, which: int, servers_too: bool = False) -> None:
        bench = self.at(which)
        self.do(bench.close())
        bench.bench.database.__dict__.pop("write", None)  # the dead process's rows are written by the test itself
        self.do(self.benches.crash(bench.bench, servers_too=servers_too))
        self.replicas.remove(bench)
        if not self.replicas:
            self.benches.time.advance(1000.0)  # an outage, which charges nobody
        self.replicas.append(self.do(self.open()))
        for bench in self.replicas:
            self.do(bench.bench.service.sweep())

    @invariant()
    def slots_add_up(self) -> None:
        if not hasattr(self, "replicas"):
            return
        bench = self.replicas[0].bench
        for _ in range(20):
            for replica in self.replicas:
                self.do(settled(replica.bench))
            open_tasks = [task for task in self.do(bench.repository.open_tasks()) if not task.released]
            if self.do(bench.taken()) == len(open_tasks):
                break  # else a keeper has just found its server dead, between the two looks
        else:
            raise AssertionError("slots and tasks differ")
        assert len(open_tasks) <= CAPACITY
        for task in open_tasks:
            known = self.tasks.get(task.task_id)
            if known is not None and task.state in ("waiting", "paused") and known.paused is not None:
                assert (task.state == "paused") == known.paused
            if task.state == "paused":
                assert all(clock.running_since_s is None for clock in task.clocks.values())

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            for bench in self.replicas:
                bench.bench.database.__dict__.pop("write", None)
                self.do(bench.close())
            self.do(self.benches.close())
            self.runner.close()
            self.fresh.__exit__(None, None, None)
            self.folder.cleanup()


async def settled(bench) -> None:
    """Wait until nothing is in flight; a start or turn that follows another replica is bounded by that one."""
    async with asyncio.timeout(20):
        while background := bench.service._registry._background:
            await asyncio.wait(background)


def dies_after(bench, num_commits: int) -> asyncio.Event:
    """From that many commits on, the bench's database takes nothing: as if the process were dead, which it then is."""
    left, honest, died = [num_commits], bench.database.write, asyncio.Event()

    async def write(fn, **options):
        if left[0] <= 0:
            died.set()
            raise StorageFailed("this process is dead")
        left[0] -= 1
        return await honest(fn, **options)

    bench.database.write = write
    return died


async def until_dead(call, died: asyncio.Event) -> Any:
    """The call's answer; None where the process dies first: nobody tells the call, whatever it waits for."""
    calling, dying = asyncio.ensure_future(call), asyncio.ensure_future(died.wait())
    await asyncio.wait({calling, dying}, return_when=asyncio.FIRST_COMPLETED)
    dying.cancel()
    if calling.done():
        return calling.result()
    calling.cancel()
    await asyncio.wait({calling})
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", kind_params())
def test_any_order_of_calls(fresh_databases, benches_class, kind):
    machine = type(
        "GatewayMachine", (Machine,), {"benches_class": benches_class, "databases": fresh_databases, "kind": kind}
    )
    options = settings(
        max_examples=40 if kind == "sqlite" else 15,
        phases=[Phase.generate],
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)
