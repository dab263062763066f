"""One scripted task, played over the replicas of a gateway: what a load is, and how each answer is checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from load_report import Report
from replica_client import Answer, NoAnswer, Refused, ReplicaClient

LOST_CODES = {"environment_failed", "environment_lost", "turn_expired"}


@dataclass(frozen=True, slots=True)
class Load:
    """What is played.

    Attributes:
        tasks: how many tasks.
        turns: turns of each; the last one terminates it.
        concurrency: tasks at once, 0 for all.
        environment: the environment's name; its answers say `info.effects`.
        key: prefix of the tasks' keys.
        script: further parameters of each task.
        limits: clock limits in seconds, named at each start.
        think_s: mean seconds before each turn, drawn from 0.5 to 1.5 of it.
        repeat: share of the turns, starts and ends that are asked for again, half of them at the same time at another
            replica, half after the answer.
        pause: share of the turns around which the task is paused and resumed, half of them while it acts.
        pause_s: seconds of each pause.
        task_deadline_s: a task that takes longer is lost.
        try_s, call_deadline_s, max_in_flight: see `ReplicaClient`.
        seed: of all draws.
    """

    tasks: int
    turns: int
    concurrency: int = 0
    environment: str = "scripted"
    key: str = "load"
    script: Mapping[str, Any] = field(default_factory=dict[str, Any])
    limits: Mapping[str, float] = field(default_factory=dict[str, float])
    think_s: float = 0.0
    repeat: float = 0.0
    pause: float = 0.0
    pause_s: float = 0.0
    task_deadline_s: float = 600.0
    try_s: float = 30.0
    call_deadline_s: float = 120.0
    max_in_flight: int = 256
    seed: int = 0


class Broken(Exception):
    """A task cannot go on; `kind` is lost, wrong, or a typed infrastructure outcome."""

    def __init__(self, kind: str, words: str) -> None:
        self.kind = kind
        super().__init__(words)


class Episode:
    """One task, played and checked.

    Attributes:
        done: its environment has ended it.
        answers: the answer of each turn, without its clocks.
    """

    def __init__(
        self,
        client: ReplicaClient,
        load: Load,
        number: int,
        report: Report,
        on_turn: Callable[[Report], None] = lambda report: None,
    ) -> None:
        self.key = f"{load.key}/{number}"
        self.task_id = ""
        self.turn = 0
        self.epoch = 0
        self.done = False
        self.answers: list[dict[str, Any]] = []
        self._client = client
        self._load = load
        self._report = report
        self._on_turn = on_turn
        self._rng = random.Random(f"{load.seed}/{number}")

    async def play(self) -> None:
        """The whole task, from its start to its account; what happened is in the report."""

        async def whole(episode: Episode, turns: int) -> None:
            await self.start()
            await self.play_on()

        await self.carry_out(whole, self._load.task_deadline_s)

    async def play_on(self) -> None:
        """The turns that are left, and the end."""
        while not self.done:
            await asyncio.sleep(self._load.think_s * self._rng.uniform(0.5, 1.5))
            await self.step()
        await self.end()

    async def carry_out(self, part: Callable[[Episode, int], Awaitable[None]], deadline_s: float) -> bool:
        """Carry out a part of the task; False where it broke, which is then in the report."""
        try:
            async with asyncio.timeout(deadline_s):
                await part(self, self._load.turns)
            return True
        except Broken as error:
            self.note(error)
        except TimeoutError:
            self.note(Broken("lost", f"not over after {deadline_s:g} s, at turn {self.turn}"))
        finally:
            self._on_turn(self._report)
        return False

    def note(self, error: Broken) -> None:
        """Put an end that is not the task's own into the report."""
        words = f"{self.key} {self.task_id or '(not started)'}: {error}"
        if error.kind in ("lost", "wrong"):
            getattr(self._report, error.kind).append(words)
        else:
            self._report.infrastructure[error.kind] += 1

    async def start(self) -> None:
        """`/start`."""
        load = self._load
        payload: dict[str, Any] = {"environment": load.environment, "key": self.key, "task": self._script()}
        if load.limits:
            payload["limits"] = dict(load.limits)
        answer = await self._twice("/start", payload)
        self.task_id = answer["task_id"]
        self._report.started += 1

    async def step(self) -> None:
        """One turn, with a pause around it by chance."""
        if self._rng.random() >= self._load.pause:
            await self.act()
        elif self._rng.random() < 0.5:
            await self._paused_between()
            await self.act()
        else:
            acting = asyncio.ensure_future(self.act())
            try:
                await self._paused_between()
            except BaseException:
                acting.cancel()
                raise
            await acting

    async def act(self) -> None:
        """The next turn, checked: its number, its one side effect, its end, and itself when repeated."""
        turn, load = self.turn, self._load
        answer = await self._twice("/observation", self.action(turn))
        self._expect(answer.get("turn") == turn + 1, f"turn {turn} was answered with turn {answer.get('turn')}")
        effects = answer["info"].get("effects")
        if effects != turn + 1:
            kind = self._report.doubled if isinstance(effects, int) and effects > turn + 1 else self._report.wrong
            kind.append(f"{self.key} {self.task_id}: after turn {turn} there are {effects} effects")
        last = turn + 1 == load.turns
        self._expect(answer["terminated"] is last, f"turn {turn} of {load.turns}: terminated {answer['terminated']}")
        self.answers.append(answer)
        self.turn, self.done = turn + 1, last
        self._report.turns += 1
        self._on_turn(self._report)

    async def pause(self) -> Answer:
        """`/pause` with the next epoch; wait until it has taken effect."""
        self.epoch += 1
        payload = {"task_id": self.task_id, "epoch": self.epoch}
        answer = await self._call("/pause", payload)
        while answer.data["state"] == "pausing":
            await asyncio.sleep(0.05)
            answer = await self._call("/pause", payload)
        self._expect(answer.data["state"] in ("paused", "done"), f"/pause answered {answer.data['state']}")
        self._report.pauses += answer.data["state"] == "paused"
        return answer

    async def resume(self) -> Answer:
        """`/resume` with the next epoch."""
        self.epoch += 1
        answer = await self._call("/resume", {"task_id": self.task_id, "epoch": self.epoch})
        self._expect(answer.data["state"] in ("waiting", "acting", "done"), f"/resume answered {answer.data['state']}")
        self._expect(answer.data["epoch"] == self.epoch or answer.data["state"] == "done", "/resume kept an old epoch")
        return answer

    async def end(self) -> None:
        """`/end`, its account checked, and a turn asked for once more afterwards."""
        account = await self._twice("/end", {"task_id": self.task_id})
        reward = self._script().get("reward", 1.0)
        found = (account["outcome"]["kind"], account["turns"], account["reward"])
        if account["outcome"]["kind"] != "completed":
            raise _broken_by(account)
        self._expect(found == ("completed", self._load.turns, reward), f"the account is {found}")
        if self._rng.random() < self._load.repeat:
            turn = self._rng.randrange(self.turn)
            again = await self._call("/observation", self.action(turn))
            self._same(f"turn {turn} after the end", self.answers[turn], again.data)
        self._report.finished += 1

    def action(self, turn: int) -> dict[str, Any]:
        """The body of a turn, the same whenever it is asked for."""
        message = {"role": "assistant", "content": f"{self.key} turn {turn}"}
        return {"task_id": self.task_id, "turn": turn, "message": message}

    async def _paused_between(self) -> None:
        before = await self.pause()
        if before.data["state"] == "done":
            return
        await asyncio.sleep(self._load.pause_s)
        after = await self.resume()
        if before.num_tries == after.num_tries == 1:
            for name, clock in before.data["clocks"].items():
                moved_s = abs(after.data["clocks"][name]["consumed_s"] - clock["consumed_s"])
                self._report.pause_drift_s = max(self._report.pause_drift_s, moved_s)
        if self._rng.random() < 0.3:
            # A late repetition of the pause: its epoch is not newer, so that it changes nothing.
            late = await self._call("/pause", {"task_id": self.task_id, "epoch": self.epoch - 1})
            self._expect(late.data["state"] not in ("paused", "pausing"), "a late pause took effect")

    async def _twice(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """A call, and by chance the same call again: at the same time elsewhere, or after its answer."""
        draw = self._rng.random()
        if draw >= self._load.repeat:
            return _without_clocks((await self._call(path, payload)).data)
        if draw < self._load.repeat / 2:
            first = self._rng.randrange(1 << 16) % self._client.num_replicas
            calls = [self._call(path, payload, first), self._call(path, payload, self._client.other(first))]
            one, two = await asyncio.gather(*calls)
        else:
            one = await self._call(path, payload)
            two = await self._call(path, payload, self._client.other(one.replica))
        self._same(f"{path} {payload.get('turn', '')}", one.data, two.data)
        return _without_clocks(one.data)

    def _same(self, what: str, one: dict[str, Any], two: dict[str, Any]) -> None:
        one, two = _without_clocks(one), _without_clocks(two)
        self._report.repeated += 1
        self._expect(one == two, f"{what}: first {str(one)[:300]}, then {str(two)[:300]}")

    def _expect(self, holds: bool, words: str) -> None:
        if not holds:
            raise Broken("wrong", words)

    async def _call(self, path: str, payload: dict[str, Any], replica: int | None = None) -> Answer:
        began_s = time.perf_counter()
        try:
            answer = await self._client.post(path, payload, replica)
        except NoAnswer as error:
            raise Broken("lost", str(error)) from error
        except Refused as error:
            raise await self._why(path, error) from error
        self._report.took(path, time.perf_counter() - began_s)
        return answer

    async def _why(self, path: str, error: Refused) -> Broken:
        """What a refusal means for the task; its account has the outcome."""
        if error.status == 404:
            return Broken("lost", str(error))
        if error.status != 410 and error.code not in LOST_CODES:
            return Broken("wrong", str(error))
        if path == "/start":
            return Broken(f"start refused ({error.code})", str(error))
        try:
            account = await self._client.post("/end", {"task_id": self.task_id})
        except (Refused, NoAnswer) as second:
            return Broken("lost", f"{error}; and then {second}")
        return _broken_by(account.data)

    def _script(self) -> dict[str, Any]:
        return {"turns": self._load.turns, **self._load.script}


def _without_clocks(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "clocks"}


def _broken_by(account: dict[str, Any]) -> Broken:
    """An end that the task did not choose: typed and without a reward, or wrong."""
    outcome = account["outcome"]
    kind = f"{outcome['kind']}({outcome.get('clock') or outcome.get('reason') or ''})"
    if outcome["kind"] == "failed" and account["reward"] is not None:
        return Broken("wrong", f"{kind} has reward {account['reward']}, not null")
    if outcome["kind"] not in ("failed", "expired", "aborted"):
        return Broken("wrong", f"a call was refused, but the account says {kind}")
    return Broken(kind, kind)
