"""What stands around the scheduler's shell: a router, workers and a gateway that do what a test says."""

from __future__ import annotations

import asyncio

from tide_trainer.types import RankId

RANK = RankId("rollout", 0)


class Router:
    """Keeps what the shell asks of the router, and plays its events."""

    url = "http://router"

    def __init__(self, log):
        self.log = log
        self.events = {}
        self.granted = asyncio.Queue()
        self.ranks = {}

    def handle(self, **handlers):
        self.events.update(handlers)

    async def open(self, session, api_key, sampling, max_context_tokens):
        self.log.append(f"open {session} at {sampling['temperature']}")

    async def close(self, session):
        self.log.append(f"close {session}")
        segment = {"token_ids": [1, 2], "sampled": [False, True], "logprobs": [0.0, -1.0], "versions": [-1, 3]}
        return {"segments": [segment]}

    async def drop_rank(self, rank):
        self.log.append(f"drop {rank}")

    def grant(self, call, rank, version, final_tokens=None):
        self.log.append(f"grant {call} at {version}")
        self.granted.put_nowait(call)
        self.ranks[call] = rank

    def abort(self, call):
        self.log.append(f"abort {call}")

    def refuse(self, call, code, message):
        self.log.append(f"refuse {call} {code}")


class Workers:
    """Tasks that end when the test says."""

    def __init__(self, log):
        self.log = log
        self.running = {}

    def handle(self, *, started):
        self.started = started

    async def run(self, session, spec, api_key, router_url):
        self.log.append(f"run {session} as {spec['key']}")
        self.running[session] = asyncio.get_running_loop().create_future()
        return await self.running[session]


class Gateway:
    """Notes pauses and resumes, or fails them."""

    def __init__(self, log, failure=None):
        self.log, self.failure = log, failure

    async def pause(self, task_id, epoch):
        self.log.append(f"pause {task_id} {epoch}")
        await asyncio.sleep(0)
        if self.failure:
            raise self.failure

    async def resume(self, task_id, epoch):
        self.log.append(f"resume {task_id} {epoch}")
        await asyncio.sleep(0)
        if self.failure:
            raise self.failure


class Clock:
    """Seconds that a test sets."""

    s = 0.0

    def __call__(self) -> float:
        return self.s


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def begin(world, prompt, member=0, **changes):
    """Starts a task and reports its start at the gateway; returns its session."""
    running = asyncio.create_task(world.shell.run(prompt, "train/0", member, 0, "train", **changes))
    await settle()
    session = f"train.0.{member}.0"
    world.tasks[session] = running
    world.workers.started({"session": session, "task_id": f"t{member}"})
    return session


def call(world, session, number, prompt_tokens=10, max_new_tokens=5):
    world.router.events["call"](
        {"session": session, "call": number, "prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
    )


def turn(world, session, number, context_tokens=12):
    footprint = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 2, "context_tokens": context_tokens}
    world.router.events["turn"]({"session": session, "call": number, "footprint": footprint})


async def finish(world, session, **account):
    world.workers.running[session].set_result({"outcome": "completed", "reward": 1.0, "turns": 1} | account)
    return await asyncio.wait_for(world.tasks[session], 2)


async def being_resumed(world, prompt):
    """A task whose call "a" is to be granted once its resume is answered; its session, and the answer."""
    session = await begin(world, prompt)
    world.shell.close_gate()
    call(world, session, "a")
    await settle()
    answered = asyncio.Event()

    async def resume(task_id, epoch):
        await answered.wait()

    world.shell._control._gateway.resume = resume
    world.shell.open_gate(1)
    await settle()
    return session, answered
