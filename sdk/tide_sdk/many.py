"""Many tasks without a trainer: attempts where the infrastructure failed, a look beforehand, a line of progress."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TextIO, cast

from tide_sdk.agents import Agent
from tide_sdk.client import GatewayClient
from tide_sdk.errors import TideError
from tide_sdk.http_connection import TransportError
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import OutcomeName, TaskResult, TaskSpec
from tide_sdk.pool import each
from tide_sdk.retries import Backoff
from tide_sdk.runner import run_task

RETRIED: frozenset[OutcomeName] = frozenset({"infrastructure", "environment_failed"})
"""Outcomes that another attempt may mend; all others are the agent's or the model's own."""
REACH_S = 10.0
"""Seconds in which a gateway or a model's server must answer before anything is played."""
_BETWEEN_ATTEMPTS = Backoff(first_s=0.2, factor=4.0, max_s=30.0)
_SHOWN_EVERY_S = 0.1


class NotReady(TransportError):
    """What the tasks need is not there; the message says what, and what to do."""


async def run_attempts(
    agent: Agent, spec: TaskSpec, gateway: GatewayClient, model: ModelEndpoint, *, attempts: int = 3
) -> tuple[TaskResult, int]:
    """Play a task, again where the infrastructure or the environment failed; the last result and how many there were.

    Cancelling ends the attempt that runs.

    Args:
        agent: who plays.
        spec: what to play; later attempts count up from its `attempt`.
        gateway: where.
        model: the model to play with.
        attempts: at most so many.
    """
    num = 1
    result = await run_task(agent, spec, gateway, model)
    while result.outcome in RETRIED and result.reward is None and num < attempts:
        await asyncio.sleep(_BETWEEN_ATTEMPTS.wait_s(num, 1.0))
        again = dataclasses.replace(spec, attempt=spec.attempt + num)
        result, num = await run_task(agent, again, gateway, model), num + 1
    return result, num


def run(
    agent: Agent,
    *,
    environment: str,
    gateway: str,
    model: ModelEndpoint,
    tasks: Sequence[Mapping[str, Any]] = ({},),
    seeds: Sequence[int] = (0,),
    repeats: int = 1,
    token: str | None = None,
    kind: Literal["train", "eval"] = "eval",
    concurrency: int = 8,
    attempts: int = 3,
    progress: bool | None = None,
) -> list[TaskResult]:
    """Play every task with every seed, without a trainer; blocks until all are over.

    The results come in the order of tasks, seeds, repeats. Where the infrastructure failed in every attempt a result
    says so in its `outcome`, and has no reward.

    Args:
        agent: who plays.
        environment: the environment's name at the gateway.
        gateway: URL of a gateway or of an environment server.
        model: any OpenAI-compatible server; closed afterwards.
        tasks: parameters for the environment.
        seeds: episode seeds.
        repeats: how often each of them is played.
        token: the gateway's token.
        kind: train or eval.
        concurrency: tasks at once.
        attempts: attempts of a task that fails for infrastructure reasons.
        progress: whether a line on stderr tells how far it is; None: where stderr is a terminal.

    Raises:
        ValueError: a number below 1.
        NotReady: the gateway or the model's server does not answer, or has no such environment. Nothing was played.
    """
    if min(concurrency, repeats, attempts) < 1:
        raise ValueError("concurrency, repeats and attempts must be at least 1")
    name = f"run-{secrets.token_hex(6)}"
    places = [(task, seed) for task in tasks for seed in seeds for _ in range(repeats)]
    specs = [
        TaskSpec(environment, f"{name}/{number}", task=task, seed=seed, kind=kind)
        for number, (task, seed) in enumerate(places)
    ]
    shown = Progress(len(specs), sys.stderr, shown=progress)

    async def play() -> list[TaskResult]:
        results: dict[int, TaskResult] = {}

        async def one(numbered: tuple[int, TaskSpec]) -> None:
            number, spec = numbered
            results[number], _ = await run_attempts(agent, spec, client, model, attempts=attempts)
            shown.add(results[number].outcome, results[number].reward)

        async with GatewayClient(gateway, token=token, references=True) as client, model:
            await reach_gateway(client, environment)
            await reach_model(model)
            with shown:
                await each(enumerate(specs), one, concurrency=concurrency)
        return [results[number] for number in range(len(specs))]

    return asyncio.run(play())


async def reach_gateway(gateway: GatewayClient, environment: str | None = None) -> str:
    """See that a gateway has the environment, or that an environment server answers; the environment's name.

    Args:
        gateway: a gateway or an environment server.
        environment: what will be started; None: what the environment server serves.

    Raises:
        NotReady: it does not answer, refuses the token, or has no such environment.
    """
    try:
        async with asyncio.timeout(REACH_S):
            try:
                listed = await gateway.get("/environments", deadline_s=REACH_S / 2)
            except TideError as error:
                if error.code != "not_found":
                    raise
                served = await gateway.get("/health", deadline_s=REACH_S / 2)
                return environment or str(served["environment"])
        names = [str(one["name"]) for one in cast("list[dict[str, Any]]", listed)]
    except TideError as error:
        if error.code in ("unauthorized", "forbidden"):
            raise NotReady(f"{gateway.url} refuses the token: {error.detail}; set TIDE_GATEWAY_TOKEN") from error
        raise NotReady(f"{gateway.url} is no gateway and no environment server: {error}") from error
    except (TransportError, TimeoutError) as error:
        why = f"no gateway answers at {gateway.url} ({error or 'too late'})"
        raise NotReady(f"{why}; start one with tide-gateway serve, or correct the URL") from error
    except (ValueError, TypeError, KeyError) as error:
        raise NotReady(f"{gateway.url} answers, but not as a gateway or an environment server does") from error
    if environment not in names:
        told = f"there is no environment {environment!r} at" if environment else "which environment? There is more at"
        raise NotReady(f"{told} {gateway.url}, which has {', '.join(names) or 'none'}")
    return environment


async def reach_model(model: ModelEndpoint) -> list[str]:
    """See that the model's server answers; the names of the models that it lists, none if it lists none.

    Raises:
        NotReady: it does not answer, or refuses the key.
    """
    try:
        return await model.models(timeout_s=REACH_S)
    except TideError as error:
        raise NotReady(f"{model.base_url}: {error.detail}; give another key") from error
    except TransportError as error:
        why = f"no model's server answers at {model.base_url} ({error})"
        raise NotReady(f"{why}; start one, or correct the URL, which usually ends in /v1") from error


class Progress:
    """One line on a terminal that tells how far many tasks are; nothing anywhere else.

    Args:
        total: tasks altogether.
        stream: where the line goes.
        shown: None: if the stream is a terminal.
        num_done: tasks that were over before.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO,
        *,
        shown: bool | None = None,
        num_done: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._stream, self._now = total, stream, now
        self._shown = stream.isatty() if shown is None else shown
        self._num_before = self._num_done = num_done
        self._rewards: list[float] = []
        self._num_lost = 0
        self._began_s = self._last_s = now()

    def add(self, outcome: str, reward: float | None) -> None:
        """Count a task that is over."""
        self._num_done += 1
        if reward is None:
            self._num_lost += 1
        else:
            self._rewards.append(reward)
        if self._now() - self._last_s >= _SHOWN_EVERY_S:
            self._show()

    def line(self) -> str:
        """What the line says now."""
        passed_s = self._now() - self._began_s
        words = [f"{self._num_done}/{self._total} played"]
        if self._rewards:
            words.append(f"mean reward {sum(self._rewards) / len(self._rewards):.3f}")
        if self._num_lost:
            words.append(f"{self._num_lost} without a reward")
        if passed_s > 0 and self._num_done > self._num_before:
            left_s = (self._total - self._num_done) * passed_s / (self._num_done - self._num_before)
            words.append(f"{left_s:.0f} s left")
        return ", ".join(words)

    def _show(self) -> None:
        self._last_s = self._now()
        if self._shown:
            self._stream.write(f"\r\x1b[K{self.line()}")
            self._stream.flush()

    def __enter__(self) -> Progress:
        self._began_s = self._last_s = self._now()
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        if self._shown:
            self._stream.write("\n")
            self._stream.flush()
