"""Whatever happens to reports on their way, the scheduler counts a task's newest one, or the router's measure."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_trainer.channel import PeerError
from tide_trainer.loop.recorder import recorder_of
from tide_trainer.loop.shell import SchedulerShell
from tide_trainer.router.app import RouterApp
from tide_trainer.router.calls import Calls
from tide_trainer.router.control import Control
from tide_trainer.router.state import Limits
from tide_trainer.run_directory import RunDirectory
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Phase
from tide_trainer.scheduling.settings import FootprintPrior
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import Completion, EngineInfo, Prompt, RankId

RANK = RankId("rollout", 0)
TASKS = ("train.0.0.0", "train.0.1.0")
CONTEXTS = (40, 7, 90, 1, 63)
"""Of the reports with the sequences 1, 2, 3 ...: contexts may also shrink."""


class Channel:
    """Stands between the router's parts and the shell: events and grants in order, a tick later."""

    url = "http://router"

    def __init__(self, renderer):
        self.events, self.handlers = [], {}
        limits = Limits()
        calls = Calls(renderer, self.notify, limits, "policy")
        ids = [*renderer.encode("go left"), *renderer.stop_token_ids]
        self.completion = Completion(tuple(ids), tuple(-0.5 for _ in ids), 10**6, "stop", version=1)
        calls.ranks[str(RANK)] = self
        self.control = Control(renderer, calls, limits, lambda: 0.0)
        self.control.reporters({"token": "reporters"})
        self.app = RouterApp(self.control, calls, renderer, self.notify, limits, "policy")

    async def generate(self, prompt_ids, sampling, **options):
        await asyncio.sleep(0)
        return self.completion

    def notify(self, name, payload):
        self.events.append((name, payload))
        asyncio.get_running_loop().call_soon(lambda: self.handlers[name](payload))

    def handle(self, **handlers):
        self.handlers.update(handlers)

    async def open(self, session, api_key, sampling, max_context_tokens):
        data = {"session": session, "api_key": "key-of-" + session, "sampling": sampling}
        self.control.open(data | {"max_context_tokens": max_context_tokens})

    async def close(self, session):
        return self.control.close({"session": session})

    def grant(self, call, rank, version, final_tokens=None):
        data = {"call": call, "rank": str(rank), "version": version, "final_tokens": final_tokens}
        asyncio.get_running_loop().call_soon(self._tell, data)

    def refuse(self, call, code, message):
        self.control.handlers()["refuse"]({"call": call, "code": code, "message": message})

    def _tell(self, data):
        with contextlib.suppress(PeerError):  # a grant that crossed with the call's end
            self.control.grant(data)

    async def post(self, path, body, key, **headers):
        pairs = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
        raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
        requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        sent = []

        async def receive():
            if requests:
                return requests.pop()
            return await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        await self.app({"type": "http", "method": "POST", "path": path, "headers": raw}, receive, send)
        return sent[0]["status"]


class Workers:
    def handle(self, *, started):
        self.started = started

    async def run(self, session, spec, api_key, router_url):
        self.started({"session": session, "task_id": session})
        await asyncio.Event().wait()


class Gateway:
    def __init__(self):
        self.log = []

    async def pause(self, task_id, epoch):
        self.log.append(f"pause {task_id} {epoch}")

    async def resume(self, task_id, epoch):
        self.log.append(f"resume {task_id} {epoch}")


class World:
    def __init__(self, renderer, budget_tokens):
        prior = FootprintPrior(prompt_tokens=10, final_tokens=20)
        whole = TrainerSettings.model_validate(
            {
                "tasks": {"environment": "toy"},
                "rollout": {"engine": "fake"},
                "train": {"backend": "fake"},
                "report": {"trajectories_every": 0},
            }
        )
        changes = {
            "probe": False,
            "growth_fraction": 0.0,
            "share_group_prefix": False,
            "default_prior": prior,
        }
        ctb = whole.scheduler.model_copy(update=changes | {"budget_fraction": 1.0})
        self.channel = Channel(renderer)
        self.scheduler = TaskScheduler(ctb)
        self.gateway = Gateway()
        whole = whole.model_copy(update={"scheduler": ctb})
        recorder = recorder_of(whole, RunDirectory("run", Path("unused")), self.scheduler, str)
        self.shell = SchedulerShell(self.scheduler, self.channel, Workers(), self.gateway, whole, "run", recorder)
        self.shell.add_rank(EngineInfo(RANK, "http://engine", budget_tokens, 1, 100))
        self.sequences = dict.fromkeys(TASKS, 0)
        self.newest: dict[str, int] = {}
        self.calls: list[tuple[str, asyncio.Task[int]]] = []
        self.gate_open = True

    async def begin(self):
        prompt = Prompt("train/0", "toy", {}, 1, "train")
        self.running = [
            asyncio.create_task(self.shell.run(prompt, "train/0", member, 0, "train")) for member in range(len(TASKS))
        ]
        await self.settle()

    async def settle(self):
        for _ in range(60):
            await asyncio.sleep(0)
        self.scheduler.check()

    async def act(self, what, task, number):
        if what == "gate":
            self.gate_open = not self.gate_open
            self.shell.open_gate(1) if self.gate_open else self.shell.close_gate()
        elif what == "call":
            body = {"model": "policy", "messages": [{"role": "user", "content": "go " * number}]}
            path = f"/sessions/{task}/v1/chat/completions"
            asking = self.channel.post(path, body, "key-of-" + task, **{"x-stainless-retry-count": "0"})
            self.calls.append((task, asyncio.create_task(asking)))
        else:
            context = CONTEXTS[number - 1]
            report = {"task": task, "sequence": number, "turn": number, "prompt_tokens": context}
            report |= {"completion_tokens": 0, "context_tokens": context, "hold": what == "hold"}
            report |= {"cached_tokens": context, "growth_tokens": number * 3 if number % 2 else None}
            if number > self.sequences[task]:
                self.sequences[task], self.newest[task] = number, context
            self.calls.append(("", asyncio.create_task(self.channel.post("/footprints", [report], "reporters"))))
        await self.settle()

    async def finish(self):
        if not self.gate_open:
            await self.act("gate", "", 0)
        await self.settle()
        assert all(one.done() for _, one in self.calls), "something is held for ever"
        measured = [event for name, event in self.channel.events if name == "turn"]
        for event in measured:
            self.newest[event["session"]] = event["footprint"]["context_tokens"]
        assert {one.result() for _, one in self.calls} <= {200, 429}
        for name, event in self.channel.events:
            if name in ("turn", "footprint"):
                footprint = event["footprint"]
                assert max(footprint["cached_tokens"], footprint["image_tokens"]) <= footprint["prompt_tokens"]
        for task, tokens in self.newest.items():
            assert self.scheduler.phase(task) is Phase.ACTING, f"{task}, {tokens} tokens"
        assert self.scheduler.view().ranks[0].usage_tokens == sum(self.newest.values())

    async def close(self):
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        await self.shell.close()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["report", "report", "hold", "hold", "call", "gate"]),
        st.sampled_from(TASKS),
        st.integers(1, len(CONTEXTS)),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_the_ledger_is_that_of_the_newest_report_of_each_task(renderers, actions):
    async def play():
        world = World(renderers["chatml"], 10_000)
        try:
            await world.begin()
            for action in actions:
                await world.act(*action)
            await world.finish()
        finally:
            await world.close()

    asyncio.run(play())


@pytest.fixture
async def world(renderers):
    """Made with its rank's budget; two tasks run."""
    made = []

    async def make(budget_tokens):
        made.append(World(renderers["chatml"], budget_tokens))
        await made[0].begin()
        return made[0]

    yield make
    await made[0].close()


async def test_a_held_report_that_does_not_fit_is_paused_until_there_is_room(world):
    world = await world(150)
    first, second = TASKS
    await world.act("report", first, 3)
    await world.act("hold", second, 5)
    assert world.scheduler.phase(second) is Phase.PAUSED
    assert not world.calls[-1][1].done()
    await world.act("report", first, 4)
    await world.finish()
    assert world.scheduler.view().ranks[0].usage_tokens == 1 + 63
    assert world.gateway.log == [f"pause {second} 1", f"resume {second} 2"]


async def test_a_waiting_call_that_is_gone_frees_its_task_and_its_repetition_is_served(world):
    world = await world(1000)
    await world.act("gate", "", 0)
    for what in ("call", "hold"):
        await world.act(what, TASKS[0], 1)
        assert world.scheduler.phase(TASKS[0]) is Phase.PAUSED
        world.calls.pop()[1].cancel()
        await world.settle()
        assert world.scheduler.phase(TASKS[0]) is Phase.ACTING
    assert [entry.split()[0] for entry in world.gateway.log] == ["pause", "resume"] * 2, "nobody else would resume it"
    assert world.scheduler.view().ranks[0].usage_tokens == CONTEXTS[0], "the loop goes on, and its context with it"
    await world.act("call", TASKS[0], 2)
    await world.finish()
    assert world.calls[-1][1].result() == 200


async def test_a_refused_task_that_shortens_its_context_is_served(world):
    world = await world(80)
    await world.act("hold", TASKS[0], 3)
    assert world.calls.pop()[1].result() == 400
    assert world.scheduler.phase(TASKS[0]) is Phase.REFUSED
    await world.act("hold", TASKS[0], 4)
    await world.finish()


async def test_reports_of_a_task_that_is_over_change_nothing(world):
    world = await world(1000)
    await world.act("report", TASKS[0], 1)
    assert world.scheduler.view().ranks[0].usage_tokens == CONTEXTS[0]
    late = dict(world.channel.events)["footprint"]
    world.running[0].cancel()
    await world.settle()
    world.channel.notify("footprint", late)
    await world.act("hold", TASKS[0], 2)
    assert world.calls[-1][1].result() == 410
    assert world.scheduler.view().ranks[0].usage_tokens == 0
