"""The tasks of one group: attempts of each member, redundant members, and what the group is worth when they are over.

Source: StaleFlow section 4.3 (group sampling, group-level redundancy, filtering).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tide_trainer.loop.prompts import Draw
from tide_trainer.settings import AlgorithmSettings
from tide_trainer.types import Kind, Prompt, Trajectory

RETRIED = frozenset({"infrastructure", "environment_failed"})
"""Outcomes that another attempt may mend; all others are the agent's or the model's own."""


class TaskRunner(Protocol):
    """Runs one task under the scheduler; the shell implements it."""

    async def run(
        self,
        prompt: Prompt,
        group: str,
        member: int,
        attempt: int,
        kind: Kind,
        temperature: float | None = None,
        version: int | None = None,
        order_key: int = 0,
    ) -> Trajectory:
        """The trajectory of one attempt; cancelling aborts the attempt and ends its task on the gateway.

        A `temperature` of None takes the configured one. With a `version` every token is sampled at it, or the task
        is refused; None goes with the versions as they come. Among tasks of equal right the smallest `order_key` goes
        first.
        """
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group does not train: `failed` where its tasks failed, not where its rewards carry no signal."""

    reason: str
    told: str
    failed: bool


async def play_siblings(
    runner: TaskRunner, draw: Draw, algorithm: AlgorithmSettings, max_attempts: int, buffer: Callable[[], int]
) -> list[Trajectory]:
    """Plays a group's members at once; returns when `group_size` have a reward, or all are over, by member.

    Redundant members that are still playing then are aborted. Cancelling aborts all. Each attempt is ordered by the
    `buffer` that the group is reserved in when it begins.
    """
    # Later samplings of a prompt count on, so that their keys at the gateway supersede what is left of earlier ones.
    first = draw.sampling * max_attempts
    uid = draw.prompt.uid

    def played(member: int) -> Awaitable[Trajectory]:
        return with_attempts(
            lambda attempt: runner.run(draw.prompt, uid, member, attempt, "train", order_key=buffer()),
            max_attempts,
            first,
        )

    members = range(algorithm.group_size + algorithm.spare_siblings)
    tasks = [asyncio.ensure_future(played(member)) for member in members]
    over: list[Trajectory] = []
    num_rewarded = 0
    try:
        for finished in asyncio.as_completed(tasks):
            over.append(await finished)
            num_rewarded += over[-1].reward is not None
            if num_rewarded == algorithm.group_size:
                break
        return sorted(over, key=lambda trajectory: trajectory.member)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refusal(trajectories: Sequence[Trajectory], algorithm: AlgorithmSettings) -> Refusal | None:
    """Why a group whose members are over does not train; None if it does."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    if len(rewards) < algorithm.min_group_size:
        failed = [trajectory for trajectory in trajectories if trajectory.reward is None]
        outcomes = ", ".join(sorted({trajectory.outcome for trajectory in failed}))
        told = next((str(t.metrics["error"]) for t in failed if "error" in t.metrics), "no error was told")
        return Refusal(f"too few rewarded siblings ({outcomes})", told, failed=True)
    if algorithm.filter_equal_rewards and min(rewards) == max(rewards):
        return Refusal("equal rewards", f"all {len(rewards)} rewards are {rewards[0]:g}", failed=False)
    return None


async def with_attempts(run: Callable[[int], Awaitable[Trajectory]], max_attempts: int, first: int = 0) -> Trajectory:
    """Runs attempts `first`, `first + 1`, ... until one has an outcome that another attempt could not mend."""
    trajectory = await run(first)
    for attempt in range(first + 1, first + max_attempts):
        if trajectory.reward is not None or trajectory.outcome not in RETRIED:
            break
        trajectory = await run(attempt)
    return trajectory
