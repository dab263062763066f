"""Runs agents: one task from `/start` to `/end`, or many at a bounded concurrency.

A bad rollout is data, not a crash: whatever goes wrong in a task becomes the `outcome` of its result.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from tide_sdk.agents import Agent
from tide_sdk.client import GatewayClient
from tide_sdk.context import AgentContext
from tide_sdk.environment import StartInfo
from tide_sdk.errors import TideError, told
from tide_sdk.footprints import FootprintReporter
from tide_sdk.http_connection import TransportError
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import MAX_ERROR_CHARS, TaskResult, TaskSpec, classify, conclude
from tide_sdk.playing import Playing
from tide_sdk.pool import each
from tide_sdk.retries import needs_place, place_wait_s
from tide_sdk.wire import EndResponse, StartResponse, fitting_reason

_log = logging.getLogger("tide_sdk.runner")
END_LIMIT_S = 30.0
"""Seconds that ending a task may take, also when the runner is cancelled."""

NO_PLACE_S = 1.0
"""Seconds after which a start is made again whose refusal names no time."""

CANCELLED_START_LIMIT_S = 2.0
"""Seconds that a cancelled runner waits for a start under way, so that it can end that task."""

_Account: TypeAlias = EndResponse | TideError | TransportError
OnStarted: TypeAlias = Callable[[StartResponse], "Awaitable[ModelEndpoint | None] | ModelEndpoint | None"]


async def run_task(
    agent: Agent,
    spec: TaskSpec,
    gateway: GatewayClient,
    model: ModelEndpoint,
    *,
    on_started: OnStarted | None = None,
    reporter: FootprintReporter | None = None,
    report_as: str | None = None,
) -> TaskResult:
    """Start a task, let the agent play it, and end it; every failure becomes the result's outcome.

    The task is ended at the gateway in every case, within `END_LIMIT_S`, and beside that the agent's clean-ups run;
    also when this call is cancelled (the cancellation then goes on). An agent that does not stop when its time is over
    or it is cancelled is abandoned after `playing.STOP_LIMIT_S`.

    Args:
        agent: who plays.
        spec: what to play.
        gateway: where.
        model: the model to play with.
        on_started: told the start; may return the endpoint that belongs to this task.
        reporter: where `ctx.report` goes.
        report_as: the task's name there; None takes its id at the gateway.
    """
    info = StartInfo(dict(spec.task or {}), spec.seed, spec.split, spec.kind)
    try:
        started = await _start(gateway, spec)
    except (TideError, TransportError) as error:
        outcome = classify(error)
        # Before the first turn there is no agent yet that could be at fault.
        outcome = "infrastructure" if outcome == "agent_error" else outcome
        return TaskResult(None, outcome, None, 0, error=told(error, MAX_ERROR_CHARS), retry_after_s=_retry(spec, error))
    deadline_s = spec.deadline_s if agent.deadline_s is None else min(spec.deadline_s, agent.deadline_s)

    async def make_context() -> AgentContext:
        endpoint = await _tell(on_started, started) or model
        return AgentContext(
            *(info, started, gateway, endpoint, reporter),
            report_as=report_as,
            max_turns=agent.max_turns,
            sampling=agent.sampling,
        )

    playing = Playing(agent, started.task_id, make_context, deadline_s)
    playing.begin()
    await playing.until_over()
    reason = _reason(playing)
    ending = asyncio.create_task(_end(gateway, started.task_id, reason and fitting_reason(reason)))
    await playing.until_closed()
    account = await _outlast(ending, playing)
    if playing.cancelled is not None:
        raise playing.cancelled
    ctx, failure = playing.ctx, playing.failure
    if ctx is None:
        return conclude(started.task_id, failure, playing.result, account, turns=0, done=False)
    done = ctx.ended and ctx.limit is None
    ended = conclude(started.task_id, failure, playing.result, account, turns=ctx.turn, done=done, limit=ctx.limit)
    return replace(ended, cleanup_errors=tuple(playing.notes))


def _retry(spec: TaskSpec, error: TideError | TransportError) -> float | None:
    """When a start that found no place, and was not to wait for one, may be made again; None where it failed."""
    if spec.waits_for_place or not needs_place(error):
        return None
    return place_wait_s(error, 0.0) or NO_PLACE_S


async def _outlast(ending: asyncio.Task[_Account], playing: Playing) -> _Account:
    """The account of a task; a cancellation in the meantime is kept."""
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            playing.cancelled = error
    return ending.result()


async def _start(gateway: GatewayClient, spec: TaskSpec) -> StartResponse:
    """Start the task; if the caller is cancelled, a start that is still answered soon is ended again.

    A later answer is left to the task's idle clock.
    """
    starting = asyncio.create_task(
        gateway.start(
            spec.environment,
            spec.key,
            task=spec.task,
            seed=spec.seed,
            split=spec.split,
            kind=spec.kind,
            limits=spec.limits,
            attempt=spec.attempt,
            waits_for_place=spec.waits_for_place,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait((starting,), timeout=CANCELLED_START_LIMIT_S)
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            await _end(gateway, starting.result().task_id, "the agent was cancelled")
        starting.cancel()
        raise


def _reason(playing: Playing) -> str | None:
    ctx, failure = playing.ctx, playing.failure
    if playing.cancelled is not None:
        return "the agent was cancelled"
    if failure is not None:
        return f"{classify(failure)}: {told(failure)}"
    if ctx is not None and ctx.limit is not None:
        return f"truncated: the agent's limit, {ctx.limit}"
    return None if ctx is not None and ctx.ended else "the agent stopped before the end"


async def _tell(on_started: OnStarted | None, started: StartResponse) -> ModelEndpoint | None:
    if on_started is None:
        return None
    told = on_started(started)
    return await told if inspect.isawaitable(told) else told


async def _end(gateway: GatewayClient, task_id: str, reason: str | None) -> _Account:
    """End the task even while the caller is being cancelled; a failure is returned."""
    ending = asyncio.create_task(gateway.end(task_id, reason, deadline_s=END_LIMIT_S))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.wait((ending,), timeout=END_LIMIT_S + 5.0)
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        ending.cancel()
    if cancelled is not None:
        raise cancelled
    if ending.cancelled():
        return TransportError(f"no answer within {END_LIMIT_S} s")
    failure = ending.exception()
    if failure is None:
        return ending.result()
    _log.warning("task %s was not ended: %s", task_id, failure)
    return failure if isinstance(failure, (TideError, TransportError)) else TransportError(repr(failure))


async def run_tasks(
    agent: Agent, specs: Iterable[TaskSpec], gateway: GatewayClient, model: ModelEndpoint, *, concurrency: int = 8
) -> list[TaskResult]:
    """Run many tasks, at most `concurrency` at once; the results come in the order of `specs`.

    Raises:
        ValueError: a concurrency below 1.
    """
    results: dict[int, TaskResult] = {}

    async def one(numbered: tuple[int, TaskSpec]) -> None:
        number, spec = numbered
        results[number] = await run_task(agent, spec, gateway, model)

    await each(enumerate(specs), one, concurrency=concurrency)
    return [results[number] for number in sorted(results)]
