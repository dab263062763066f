"""Runs agents: one task from `/start` to `/end`, or many at a bounded concurrency.

A bad rollout is data, not a crash: whatever goes wrong in a task becomes the `outcome` of its result.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from tide_sdk.agents import Agent, AgentResult
from tide_sdk.client import GatewayClient
from tide_sdk.context import AgentContext
from tide_sdk.environment import StartInfo
from tide_sdk.errors import TideError
from tide_sdk.footprints import FootprintReporter
from tide_sdk.http_connection import TransportError
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import DeadlinePassed, TaskResult, TaskSpec, classify, conclude
from tide_sdk.pool import each
from tide_sdk.wire import EndResponse, StartResponse

_log = logging.getLogger("tide_sdk.runner")
END_LIMIT_S = 30.0
"""Seconds that ending a task may take, also when the runner is cancelled."""

CANCELLED_START_LIMIT_S = 2.0
"""Seconds that a cancelled runner waits for a start under way, so that it can end that task."""

OnStarted: TypeAlias = Callable[[StartResponse], "Awaitable[ModelEndpoint | None] | ModelEndpoint | None"]


async def run_task(
    agent: Agent,
    spec: TaskSpec,
    gateway: GatewayClient,
    model: ModelEndpoint,
    *,
    on_started: OnStarted | None = None,
    reporter: FootprintReporter | None = None,
) -> TaskResult:
    """Start a task, let the agent play it, and end it; every failure becomes the result's outcome.

    The task is ended at the gateway in every case, within `END_LIMIT_S`, also when this call is cancelled (the
    cancellation then goes on).

    Args:
        agent: who plays.
        spec: what to play.
        gateway: where.
        model: the model to play with.
        on_started: told the start; may return the endpoint that belongs to this task.
        reporter: where `ctx.report` goes.
    """
    info = StartInfo(dict(spec.task or {}), spec.seed, spec.split, spec.kind)
    try:
        started = await _start(gateway, spec)
    except (TideError, TransportError) as error:
        outcome = classify(error)
        # Before the first turn there is no agent yet that could be at fault.
        return TaskResult(None, "infrastructure" if outcome == "agent_error" else outcome, None, 0, error=str(error))
    ctx: AgentContext | None = None
    failure: BaseException | None = None
    result = AgentResult()
    try:
        async with asyncio.timeout(spec.deadline_s) as deadline:
            try:
                endpoint = await _tell(on_started, started) or model
                ctx = AgentContext(info, started, gateway, endpoint, reporter)
                result = await agent(ctx)
            except TimeoutError as error:
                if deadline.expired():
                    raise
                raise RuntimeError(f"TimeoutError in the agent: {error}") from error
    except TimeoutError as error:
        failure = DeadlinePassed(f"the task took longer than {spec.deadline_s} s")
        failure.__cause__ = error
    except Exception as error:  # noqa: BLE001 (the boundary: it becomes the outcome)
        failure = error
    except BaseException:
        await _end(gateway, started.task_id, "the agent was cancelled")
        raise
    account = await _end(gateway, started.task_id, _reason(ctx, failure))
    turns = 0 if ctx is None else ctx.turn
    return conclude(started.task_id, failure, result, account, turns=turns, done=_done(ctx))


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


def _done(ctx: AgentContext | None) -> bool:
    return ctx is not None and ctx.done


def _reason(ctx: AgentContext | None, failure: BaseException | None) -> str | None:
    if failure is not None:
        return f"{classify(failure)}: {failure}"
    return None if _done(ctx) else "the agent stopped before the end"


async def _tell(on_started: OnStarted | None, started: StartResponse) -> ModelEndpoint | None:
    if on_started is None:
        return None
    told = on_started(started)
    return await told if inspect.isawaitable(told) else told


async def _end(gateway: GatewayClient, task_id: str, reason: str | None) -> EndResponse | TideError | TransportError:
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
