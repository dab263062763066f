"""Rollout: prompts become groups of trajectories, as many at once as the staleness bound admits.

    PromptSource -> reserve (V_traj + eta >= V_buf) -> group_size tasks under the scheduler -> occupy -> next_batch()
         ^ stops when no place can be reserved; unblocked by the weight sync, which raises the rollout version

Consumes: prompts. Waits for: a free place (sync), finished tasks (engine, environment), a Ready buffer (trainer side).
Source: StaleFlow section 4.2 (Reserve, Occupy, Consume), TideRL section 3.2 (groups go to a global buffer).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from tide_trainer.errors import RunFailed
from tide_trainer.loop.prompts import PromptSource
from tide_trainer.persistence.repository import RunRepository
from tide_trainer.scheduling.staleness import BufferView, StalenessBuffers
from tide_trainer.settings import AlgorithmSettings
from tide_trainer.settings_play import AgentSettings
from tide_trainer.types import Group, Kind, Prompt, Trajectory

_LOG = logging.getLogger(__name__)
MAX_DROPPED_IN_A_ROW = 16
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
    ) -> Trajectory:
        """The trajectory of one attempt; cancelling aborts the attempt and ends its task on the gateway.

        A `temperature` of None takes the configured one. With a `version` every token is sampled at it, or the task
        is refused; None goes with the versions as they come.
        """
        ...


class Rollout:
    """Keeps the staleness buffers full.

    Args:
        runner: runs tasks.
        source: where prompts come from.
        repository: where every prompt's fate is written.
        algorithm: group size, batch size and eta.
        agent: attempts per task.
        unix_s: the time of day, with which a group notes when it began.
    """

    def __init__(
        self,
        runner: TaskRunner,
        source: PromptSource,
        repository: RunRepository,
        algorithm: AlgorithmSettings,
        agent: AgentSettings,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._runner = runner
        self._source = source
        self._repository = repository
        self._algorithm = algorithm
        self._agent = agent
        self._unix_s = unix_s
        self._buffers = StalenessBuffers(algorithm.eta, algorithm.groups_per_batch)
        self._version = 0
        self._groups: dict[str, Group] = {}
        self._began_s: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._dropped_in_a_row = 0
        self._open = False

    def open(self) -> None:
        """Begins to fill the buffers; idempotent."""
        self._open = True
        self._fill()

    def set_version(self, version: int) -> None:
        """The rollout ranks serve `version` from now on: newer buffers can be reserved."""
        self._version = version
        self._buffers.check()
        self._fill()

    @property
    def trainer_version(self) -> int:
        """The model version that the next train step starts from."""
        return self._buffers.version

    def oldest_s(self) -> float | None:
        """Unix time at which the oldest group was begun that is neither consumed nor dropped; None without one."""
        return min(self._began_s.values(), default=None)

    def buffers(self) -> tuple[BufferView, ...]:
        """The buffers as they stand, for people."""
        return self._buffers.states()

    async def next_batch(self) -> tuple[int, list[Group]]:
        """Waits until the buffer of the trainer's present version is Ready and consumes it.

        Returns:
            The buffer's version `V_buf` and its groups.

        Raises:
            RunFailed: a group's coroutine failed, too many groups in a row were dropped, or no group ended for so long
                that each of its attempts must have timed out.
        """
        limit_s = self._agent.task_timeout_s * self._agent.max_attempts
        while self._failure is None and not self._buffers.ready():
            self._changed.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._changed.wait()
            except TimeoutError as error:
                raise RunFailed(
                    f"no group ended for {limit_s:g} s: nothing is granted, or nothing answers; see main.log"
                ) from error
        if self._failure is not None:
            raise RunFailed(f"rollout failed: {self._failure}") from self._failure
        version = self._buffers.version
        entries = self._buffers.consume()
        self._fill()
        for uid in entries:
            del self._began_s[uid]
        return version, [self._groups.pop(uid) for uid in entries]

    async def close(self) -> None:
        """Aborts what runs; the caller accounts for the prompts (`drop_unfinished`)."""
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fill(self) -> None:
        while self._open and self._buffers.can_reserve(self._version):
            prompt = self._source.take()
            uid = prompt.uid
            self._buffers.reserve(uid, self._version)
            self._began_s[uid] = self._unix_s()
            task = asyncio.create_task(self._group(uid, prompt, self._version), name=uid)
            self._tasks.add(task)
            task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._changed.set()

    async def _group(self, uid: str, prompt: Prompt, version: int) -> None:
        await self._repository.add_group(uid, prompt, version)
        members = range(self._algorithm.group_size)
        trajectories = await asyncio.gather(*(self._member(uid, prompt, member) for member in members))
        rewarded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        if len(rewarded) < self._algorithm.min_group_size:
            await self._drop(uid, trajectories)
            return
        sampled = [trajectory.version for trajectory in rewarded if trajectory.segments]
        group = Group(uid, prompt, tuple(trajectories), min(sampled, default=version))
        if group.version < version:
            raise RunFailed(f"group {uid} holds tokens of version {group.version}, older than its reserved {version}")
        await self._repository.finish_group(group)
        self._dropped_in_a_row = 0
        self._groups[uid] = group
        self._buffers.occupy(uid)
        self._fill()

    async def _drop(self, uid: str, trajectories: list[Trajectory]) -> None:
        failed = [trajectory for trajectory in trajectories if trajectory.reward is None]
        reason = f"too few rewarded siblings ({', '.join(sorted({trajectory.outcome for trajectory in failed}))})"
        told = next((str(t.metrics["error"]) for t in failed if "error" in t.metrics), "no error was told")
        _LOG.warning("group %s dropped: %s: %s", uid, reason, told)
        await self._repository.drop_group(uid, reason)
        self._buffers.delete(uid)
        del self._began_s[uid]
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= MAX_DROPPED_IN_A_ROW:
            raise RunFailed(f"{self._dropped_in_a_row} groups in a row were dropped, the last one: {reason}: {told}")
        self._fill()

    async def _member(self, uid: str, prompt: Prompt, member: int) -> Trajectory:
        return await with_attempts(
            lambda attempt: self._runner.run(prompt, uid, member, attempt, "train"), self._agent.max_attempts
        )


async def with_attempts(run: Callable[[int], Awaitable[Trajectory]], max_attempts: int) -> Trajectory:
    """Runs attempts 0, 1, ... until one has an outcome that another attempt could not mend."""
    trajectory = await run(0)
    for attempt in range(1, max_attempts):
        if trajectory.reward is not None or trajectory.outcome not in RETRIED:
            break
        trajectory = await run(attempt)
    return trajectory
