"""What the SDK and the router add to a turn, and what a call costs while thousands are queued.

1. 64 tasks at once, an engine whose completions take 200 ms (8 tokens of 25 ms). Two sides, in turn, in one run:
   - direct: the very same number of completions asked of the engine's own HTTP server, nothing in between;
   - stack: an @agent plays tasks: `ctx.generate` (SDK, router, grant, engine, capture) and `ctx.step` (an environment
     server of the SDK in this process). Who grants is this process, at once.
   The value is the median turn of the stack minus the median completion of the direct side, in ms.
2. Calls queued in the SDK and the router, none granted, then all: CPU of this process and of the router per call at
   1,000, 4,000 and 16,000 calls. Flat: the largest costs at most a quarter more than the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import uvloop
from process_times import Processes, cpu_times_s
from sdk_stack import END, START, Stack, stack

from tide_sdk import AgentContext, Environment, EnvironmentServer, GatewayClient, ModelEndpoint, Start, Step, TaskSpec
from tide_sdk.agents import agent
from tide_sdk.collector import spare_collections
from tide_sdk.http_parse import Response
from tide_sdk.runner import run_task
from tide_trainer import types

NAME = "sdk"
GOAL_MS = 2.0
FLAT = 1.25
NUM_TASKS, NUM_TURNS, NUM_ROUNDS = 64, 20, 3
TOKEN_LATENCY_S, NUM_TOKENS = 0.025, 8
OBSERVATION = "You stand in a small room. A red door is to your left, a key lies on the floor before you."
QUEUED = (1_000, 4_000, 16_000)
IN_FLIGHT = {"most in the client": 1_024, "all in the router": QUEUED[-1]}
"""Where the queue stands: how many calls the client lets out at once."""
CALLS_PER_SESSION = 2
TIMEOUT_S = 900


class Room(Environment):
    """Says the same sentence until the last turn."""

    name = "room"
    capacity = 4096
    blocking = False

    def start(self, task: Any) -> Start:
        self.turns = 0
        return Start(OBSERVATION)

    def step(self, message: Any) -> Step:
        self.turns += 1
        return Step(OBSERVATION, 0.0, terminated=self.turns == NUM_TURNS)


class InProcess:
    """An ASGI application as a transport of the SDK's clients."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, headers: Any = None, **_: Any
    ) -> Response:
        raw = [(b"content-type", b"application/json"), (b"tide-contract", b"1")]
        route, _, query = path.partition("?")
        scope = {"type": "http", "method": method, "path": route, "query_string": query.encode(), "headers": raw}
        events: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body or b"", "more_body": False}

        async def send(event: Any) -> None:
            events.append(event)

        await self._app(scope, receive, send)
        answer = {name.decode(): value.decode() for name, value in events[0]["headers"]}
        return Response(events[0]["status"], answer, b"".join(event.get("body", b"") for event in events[1:]))

    async def aclose(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class Round:
    """The seconds of each turn or completion, and the CPU seconds of each process."""

    turns_s: list[float]
    cpu_s: dict[str, float]


def _processes(one: Stack) -> dict[str, Processes]:
    pids = {"sdk and grants": os.getpid(), "router": one.router.pid, "engine": one.engine_process.pid}
    return {name: Processes((pid,)) for name, pid in pids.items()}


async def _direct(one: Stack) -> Round:
    """Completions of growing prompts, 64 at a time, without anything in between."""
    sampling = types.Sampling(1.0, NUM_TOKENS, ())
    added = len(f"{START}user\n{OBSERVATION}{END}\n{START}assistant\n") - len(START + START + END) + 3
    times: list[float] = []

    async def converse() -> None:
        ids = [2 + index % 200 for index in range(added)]
        for _ in range(NUM_TURNS):
            began_s = time.perf_counter()
            completion = await one.engine.generate(ids, sampling)
            times.append(time.perf_counter() - began_s)
            ids = [*ids, *completion.token_ids, *ids[:added]]

    return await _measured(one, times, converse)


async def _through(one: Stack, base: ModelEndpoint, gateway: GatewayClient, number: int) -> Round:
    """The same as tasks of an agent."""
    times: list[float] = []
    fresh = itertools.count()

    @agent
    async def play(ctx: AgentContext) -> None:
        while not ctx.done:
            began_s = time.perf_counter()
            reply = await ctx.generate()
            await ctx.step(reply)
            times.append(time.perf_counter() - began_s)

    async def task() -> None:
        session = f"round-{number}-task-{next(fresh)}"
        url, key = await one.open(session)
        result = await run_task(play, TaskSpec("room", session), gateway, base.at(base_url=url, api_key=key))
        captured = await one.close(session)
        if result.outcome != "completed" or captured["num_calls"] != NUM_TURNS or captured["num_breaks"]:
            raise RuntimeError(f"{session}: {result}, {captured['num_calls']} calls, {captured['num_breaks']} breaks")

    return await _measured(one, times, task)


async def _measured(one: Stack, times: list[float], converse: Any) -> Round:
    async def later(index: int) -> None:
        # Not all at one moment: what is measured is a turn, not a queue of 64.
        await asyncio.sleep(index * TOKEN_LATENCY_S * NUM_TOKENS / NUM_TASKS)
        await converse()

    before = cpu_times_s(_processes(one))
    await asyncio.gather(*(later(index) for index in range(NUM_TASKS)))
    after = cpu_times_s(_processes(one))
    return Round(times, {name: after[name] - before[name] for name in after})


async def _overhead(folder: Path, rounds: int) -> dict[str, Any]:
    latency = {"token_latency_s": TOKEN_LATENCY_S, "max_new_tokens": NUM_TOKENS, "max_running": 256}
    app = EnvironmentServer(Room)
    gateway = GatewayClient("http://127.0.0.1:1", http=InProcess(app))
    direct: list[Round] = []
    through: list[Round] = []
    async with stack(folder, **latency) as one, ModelEndpoint(f"{one.router.url}/v1", model="policy") as base:
        for number in range(rounds):
            direct.append(await _direct(one))
            through.append(await _through(one, base, gateway, number))
            print(f"bench-{NAME}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    await app.aclose()
    return _told(direct, through)


def _told(direct: list[Round], through: list[Round]) -> dict[str, Any]:
    sides = {"direct": direct, "stack": through}
    all_s = {side: [value for one in rounds for value in one.turns_s] for side, rounds in sides.items()}
    p50 = {side: median(values) * 1e3 for side, values in all_s.items()}
    p99 = {side: quantiles(values, n=100)[98] * 1e3 for side, values in all_s.items()}
    num = {side: len(values) for side, values in all_s.items()}
    cpu = {
        side: {name: sum(one.cpu_s[name] for one in rounds) / num[side] * 1e3 for name in rounds[0].cpu_s}
        for side, rounds in sides.items()
    }
    return {
        "p50_overhead_ms": p50["stack"] - p50["direct"],
        "p99_overhead_ms": p99["stack"] - p99["direct"],
        "p50_ms": p50,
        "p99_ms": p99,
        "cpu_ms_a_turn": cpu,
        "num_turns": num,
    }


async def _queued(folder: Path, num_calls: int, max_in_flight: int) -> dict[str, float]:
    """CPU per call, in ms, with all of `num_calls` queued before the first is granted."""
    num_sessions = num_calls // CALLS_PER_SESSION
    async with stack(folder, token_latency_s=0.0, max_new_tokens=1, max_running=256) as one:
        base = ModelEndpoint(f"{one.router.url}/v1", model="policy", max_in_flight=max_in_flight)
        keys = [await one.open(f"queue-{number}") for number in range(num_sessions)]
        endpoints = [base.at(base_url=url, api_key=key) for url, key in keys]
        one.granting = False
        before = cpu_times_s(_processes(one))
        calls = [
            asyncio.create_task(endpoint.complete([{"role": "user", "content": f"{OBSERVATION} {number}"}]))
            for number in range(CALLS_PER_SESSION)
            for endpoint in endpoints
        ]
        # One call of a session is held; the rest wait behind it, in the router or in the client.
        await one.until_held(min(num_sessions, max_in_flight))
        one.granting = True
        while one.held:
            one.grant(one.held.popleft())
        for completion in await asyncio.gather(*calls):
            if completion["usage"]["completion_tokens"] != 1:
                raise RuntimeError(f"an answer of {completion['usage']}")
        after = cpu_times_s(_processes(one))
        await base.aclose()
    return {name: (after[name] - before[name]) / num_calls * 1e3 for name in after}


def _growth(cpu_ms: dict[int, dict[str, float]]) -> float:
    """What a call costs with the most calls queued, over what it costs with the fewest."""
    per_call = [of["sdk and grants"] + of["router"] for of in (cpu_ms[QUEUED[-1]], cpu_ms[QUEUED[0]])]
    return per_call[0] / per_call[1]


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="rounds of both sides")
    parser.add_argument("--out", type=Path, help="file that takes the last line too")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=f"tide-bench-{NAME}-"))
    spare_collections()  # as an agent worker does
    try:
        overhead, queued = uvloop.run(asyncio.wait_for(_all(folder, arguments.rounds), TIMEOUT_S))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    growth = {where: _growth(of) for where, of in queued.items()}
    value = overhead["p50_overhead_ms"]
    details = overhead | {"queued_cpu_ms_a_call": queued, "queued_growth": growth, "cores": os.cpu_count()}
    line = json.dumps(
        {
            "name": NAME,
            "value": round(value, 3),
            "unit": f"ms of a turn beside the engine's own, median of {NUM_TASKS} tasks at once",
            "goal": GOAL_MS,
            "holds": value < GOAL_MS and max(growth.values()) <= FLAT,
            "details": json.loads(json.dumps(details), parse_float=lambda text: round(float(text), 3)),
        }
    )
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


async def _all(folder: Path, rounds: int) -> tuple[dict[str, Any], dict[str, dict[int, dict[str, float]]]]:
    overhead = await _overhead(folder / "overhead", rounds)
    queued: dict[str, dict[int, dict[str, float]]] = {where: {} for where in IN_FLIGHT}
    for where, max_in_flight in IN_FLIGHT.items():
        for number in QUEUED:
            name = f"{where}-{number}"
            queued[where][number] = await _queued(folder / name, number, max_in_flight)
            print(f"bench-{NAME}: {number} calls queued, {where}", file=sys.stderr, flush=True)
    return overhead, queued


if __name__ == "__main__":
    sys.exit(main())
