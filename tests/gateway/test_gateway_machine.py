"""Any order of calls, time and crashes: one action has one effect, answers repeat, slots add up, clocks keep still."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tide_gateway.database import sqlite_url
from tide_sdk.errors import TideError
from tide_sdk.migrations import migrate

KEYS = st.sampled_from("abc")
INDEX = st.integers(0, 63)


class Known:
    """What the model knows of one task."""

    def __init__(self, key: str, attempt: int) -> None:
        self.key = key
        self.attempt = attempt
        self.answers: dict[int, tuple[str, Any]] = {}
        self.paused = False
        self.account: dict | None = None


class Machine(RuleBasedStateMachine):
    benches_class: Any
    template: Path

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tide-test-"))
        shutil.copy(self.template, self.folder / "gateway.db")
        self.runner = asyncio.Runner()
        self.benches = self.benches_class(self.folder / "gateway.db")
        self.bench = self.do(self.benches.open(capacity=2))
        self.tasks: dict[str, Known] = {}
        self.attempts: dict[str, int] = {}
        self.environments: list[Any] = []

    def do(self, call) -> Any:
        return self.runner.run(call)

    def attempt(self, call) -> Any:
        """The call's answer, or its error."""
        try:
            return self.do(call)
        except TideError as error:
            return error

    @rule(key=KEYS, newer=st.booleans())
    def start(self, key: str, newer: bool) -> None:
        attempt = self.attempts.get(key, 0) + (1 if newer and key in self.attempts else 0)
        answer = self.attempt(self.bench.start(key, attempt=attempt, turns=4, reward=1.0))
        if isinstance(answer, TideError):
            assert answer.code in ("capacity", "ended", "expired", "environment_lost", "stale_attempt"), answer
            return
        self.attempts[key] = attempt
        known = self.tasks.setdefault(answer["task_id"], Known(key, attempt))
        assert (known.key, known.attempt) == (key, attempt)

    def pick(self, index: int) -> tuple[str, Known]:
        """A task by the order of the starts: ids are random, and what is drawn must not depend on them."""
        task_id = list(self.tasks)[index % len(self.tasks)]
        return task_id, self.tasks[task_id]

    @rule(index=INDEX, text=st.sampled_from(["go", "stop"]), back=st.integers(-1, 2))
    def act(self, index: int, text: str, back: int) -> None:
        if not self.tasks:
            return
        task_id, known = self.pick(index)
        turn = max(0, len(known.answers) - back)
        answer = self.attempt(self.bench.act(task_id, turn, text))
        if turn in known.answers:
            said, before = known.answers[turn]
            if said == text:
                assert {**answer, "clocks": 0} == before
            else:
                assert answer.code == "turn_conflict"
        elif isinstance(answer, TideError):
            assert answer.status in (409, 410, 423), answer
            assert answer.code != "turn_conflict"
        else:
            assert turn == len(known.answers)
            assert not known.paused
            assert answer["info"]["effects"] == turn + 1
            known.answers[turn] = (text, {**answer, "clocks": 0})

    @rule(index=INDEX, epoch=st.integers(1, 9), paused=st.booleans())
    def pause_or_resume(self, index: int, epoch: int, paused: bool) -> None:
        if not self.tasks:
            return
        task_id, known = self.pick(index)
        answer = self.attempt((self.bench.pause if paused else self.bench.resume)(task_id, epoch))
        known.paused = not isinstance(answer, TideError) and answer["state"] == "paused"

    @rule(index=INDEX)
    def end(self, index: int) -> None:
        if not self.tasks:
            return
        task_id, known = self.pick(index)
        account = self.do(self.bench.end(task_id))
        if known.account is not None:
            assert account == known.account
        known.account, known.paused = account, False
        assert account["turns"] == len(known.answers)
        if account["outcome"]["kind"] == "failed":
            assert account["reward"] is None
        if account["outcome"]["kind"] == "completed":
            assert (account["reward"], account["turns"]) == (1.0, 4)

    @rule(seconds=st.sampled_from([0.1, 5.0, 19.0, 25.0]))
    def pass_time(self, seconds: float) -> None:
        self.bench.time.advance(seconds)
        self.do(self.bench.service.sweep())

    @rule()
    def crash(self) -> None:
        self.do(self.benches.crash(self.bench))
        self.benches.time.advance(1000.0)
        self.bench = self.do(self.benches.open(capacity=2))
        for known in self.tasks.values():
            known.paused = False

    @invariant()
    def slots_add_up(self) -> None:
        if not hasattr(self, "bench"):
            return

        async def settled() -> None:
            async with asyncio.timeout(10):
                while background := self.bench.service._registry._background:
                    await asyncio.wait(background)

        self.do(settled())
        open_tasks = [task for task in self.do(self.bench.repository.open_tasks()) if not task.released]
        assert self.await bench.taken() == len(open_tasks) <= 2
        on_servers = sum(len(environment.tasks) for environment in self.bench.runtime.launched.values())
        assert on_servers == len(open_tasks)
        for task in open_tasks:
            known = self.tasks[task.task_id]
            assert (task.state == "paused") == known.paused
            if known.paused:
                assert all(clock.running_since_s is None for clock in task.clocks.values())

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.do(self.benches.close())
            self.runner.close()
            shutil.rmtree(self.folder)


@pytest.mark.timeout(300)
def test_any_order_of_calls(tmp_path, benches_class):
    template = tmp_path / "template.db"
    migrate("gateway", sqlite_url(f"sqlite:///{template}"))
    machine = type("GatewayMachine", (Machine,), {"benches_class": benches_class, "template": template})
    options = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=options)
