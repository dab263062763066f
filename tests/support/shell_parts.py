"""What stands around the scheduler's shell: a router, workers and a gateway that do what a test says."""

from __future__ import annotations

import asyncio


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
