"""Rollout: prompts become groups of trajectories, as many at once as the staleness bound admits.

    PromptSource -> reserve (V_traj + eta >= V_buf) -> group_size tasks under the scheduler -> occupy -> next_batch()
       ^  ^ stops when no place can be reserved; unblocked by the weight sync, which raises the rollout version
       |  +---- filtered (no signal) or failed: dropped with a reason, another prompt takes the place
       +------- overdue in a Stuck buffer, or surplus: aborted, sampled again once the next batch is consumed

Consumes: prompts. Waits for: a free place (sync), finished tasks (engine, environment), a Ready buffer (trainer side).
Each change of the buffers is written with its group's row, in the order of the changes.
Source: StaleFlow sections 4.2 (Reserve, Occupy, Consume) and 4.3, TideRL section 3.2 (groups go to a global buffer).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from tide_trainer.errors import RunFailed
from tide_trainer.loop.batches import newest_version
from tide_trainer.loop.prompts import Draw, PromptSource
from tide_trainer.loop.siblings import RETRIED, Refusal, TaskRunner, play_siblings, refusal, with_attempts
from tide_trainer.persistence.repository import RunRepository
from tide_trainer.scheduling.staleness import BufferView, StalenessBuffers
from tide_trainer.scheduling.staleness_stuck import Awaited, StuckClock, stuck_limit_s
from tide_trainer.settings import AlgorithmSettings
from tide_trainer.settings_play import AgentSettings
from tide_trainer.types import Group

__all__ = ["RETRIED", "EpisodeFacts", "Rollout", "TaskRunner", "with_attempts"]

_LOG = logging.getLogger(__name__)
MAX_DROPPED_IN_A_ROW = 16
MAX_FILTERED_IN_A_ROW = 1_000
STUCK_LOOK_S = 1.0
"""Seconds between looks at a Stuck buffer."""


class EpisodeFacts(Protocol):
    """What the Stuck limit needs to know of the tasks; the shell implements it."""

    def paused_s(self, group: str) -> float:
        """Seconds for which the group's live members have been paused so far, of the one that was paused longest."""
        ...

    def episode_s(self, environment: str) -> float | None:
        """Mean unpaused seconds of an episode of the environment, as measured; None before the first."""
        ...


class Rollout:
    """Keeps the staleness buffers full.

    Args:
        runner: runs tasks.
        source: where prompts come from.
        repository: where every prompt's fate is written.
        algorithm: group size, batch size, eta, redundancy, filtering and the Stuck limit.
        agent: attempts per task.
        unix_s: the time of day, with which a group notes when it began.
        facts: pauses and episodes; None counts no pauses and knows no episode.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        runner: TaskRunner,
        source: PromptSource,
        repository: RunRepository,
        algorithm: AlgorithmSettings,
        agent: AgentSettings,
        unix_s: Callable[[], float] = time.time,
        facts: EpisodeFacts | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._source = source
        self._repository = repository
        self._algorithm = algorithm
        self._agent = agent
        self._unix_s = unix_s
        self._facts = facts
        self._now = now
        self._buffers = StalenessBuffers(algorithm.eta, algorithm.groups_per_batch, num_spare=algorithm.spare_groups)
        self._stuck = StuckClock()
        self._version = 0
        self._groups: dict[str, Group] = {}
        self._draws: dict[str, Draw] = {}
        self._began_s: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._dropped_in_a_row = self._filtered_in_a_row = 0
        self._ended_s = now()
        self._open = False

    def restore(self, buffers: StalenessBuffers, draws: Mapping[str, Draw], groups: Iterable[Group]) -> None:
        """Takes up where an earlier life of the run was, before `open`.

        Args:
            buffers: with `groups` occupied in them; the ranks serve their version.
            draws: which sampling of its prompt each group is.
            groups: complete and not trained.
        """
        self._buffers, self._version = buffers, buffers.version
        for group in groups:
            self._groups[group.uid] = group
            self._draws[group.uid] = draws[group.uid]
            # Nobody knows when its images were put: none is removed before it is trained.
            self._began_s[group.uid] = 0.0

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
        self._ended_s = self._now()
        while self._failure is None and not self._buffers.ready():
            self._changed.clear()
            left_s = self._ended_s + limit_s - self._now()
            if left_s <= 0:
                raise RunFailed(
                    f"no group ended for {limit_s:g} s: nothing is granted, or nothing answers; see main.log"
                )
            await self.abort_overdue()
            try:
                async with asyncio.timeout(min(left_s, STUCK_LOOK_S)):
                    await self._changed.wait()
            except TimeoutError:
                continue
        self._stuck.clear()
        if self._failure is not None:
            raise RunFailed(f"rollout failed: {self._failure}") from self._failure
        version = self._buffers.version
        entries = self._buffers.consume()
        written = [self._repository.consume(entries, version, self._buffers.take_changes())]
        written += [self._give_up(uid, "surplus", self._buffers.version) for uid in self._buffers.surplus]
        groups = [self._groups.pop(uid) for uid in entries]
        for uid in entries:
            del self._began_s[uid], self._draws[uid]
        self._fill()
        await asyncio.gather(*written)
        return version, groups

    async def abort_overdue(self) -> None:
        """Gives up what a Stuck buffer has waited for too long; call it only while the trainer waits."""
        algorithm, facts = self._algorithm, self._facts
        if not algorithm.stuck_s:
            return
        awaited: dict[str, Awaited] = {}
        for uid in self._buffers.stuck():
            episode_s = facts.episode_s(self._draws[uid].prompt.environment) if facts else None
            limit_s = stuck_limit_s(algorithm.stuck_s, algorithm.stuck_episodes, episode_s)
            awaited[uid] = Awaited(facts.paused_s(uid) if facts else 0.0, limit_s)
        written: list[Awaitable[object]] = []
        for uid in self._stuck.overdue(awaited, self._now()):
            _LOG.warning("group %s is aborted: a train step waited for it for %g s", uid, awaited[uid].limit_s)
            self._buffers.delete(uid)
            written.append(self._give_up(uid, "stuck", self._buffers.version + 1))
        if written:
            self._fill()
            await asyncio.gather(*written)

    async def close(self) -> None:
        """Aborts what runs; the caller accounts for the prompts (`drop_unfinished`)."""
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _give_up(self, uid: str, reason: str, not_before: int) -> Awaitable[object]:
        """Aborts a group that left the buffers; its prompt is sampled again, or dropped after the last sampling."""
        draw = self._draws.pop(uid)
        del self._began_s[uid]
        self._groups.pop(uid, None)
        if (playing := self._playing.pop(uid, None)) is not None:
            playing.cancel()
        self._changed.set()
        num, changes = draw.sampling + 1, self._buffers.take_changes()
        if num >= self._algorithm.max_samplings:
            return self._repository.drop_group(uid, f"given up {num} times, at last as {reason}", changes)
        self._source.put_back(Draw(draw.prompt, num), not_before)
        return self._repository.put_back(uid, reason, num, changes)

    def _fill(self) -> None:
        while self._open and self._buffers.can_reserve(self._version):
            draw = self._source.take(self._buffers.version)
            uid = draw.prompt.uid
            self._buffers.reserve(uid, self._version)
            changes = self._buffers.take_changes()
            added = self._repository.add_group(uid, draw.prompt, self._version, draw.sampling, changes)
            self._draws[uid] = draw
            self._began_s[uid] = self._unix_s()
            task = asyncio.create_task(self._group(uid, draw, self._version, added), name=uid)
            self._playing[uid] = task
            self._tasks.add(task)
            task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._playing.get(task.get_name()) is task:
            del self._playing[task.get_name()]
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._changed.set()

    async def _group(self, uid: str, draw: Draw, version: int, added: Awaitable[object]) -> None:
        await added
        trajectories = await play_siblings(
            self._runner,
            draw,
            self._algorithm,
            self._agent.max_attempts,
            lambda: self._buffers.buffer_of(uid),
        )
        refused = refusal(trajectories, self._algorithm)
        if refused is not None:
            await self._drop(uid, refused)
            return
        sampled = [
            trajectory.version for trajectory in trajectories if trajectory.segments and trajectory.reward is not None
        ]
        group = Group(uid, draw.prompt, tuple(trajectories), min(sampled, default=version))
        if group.version < version:
            raise RunFailed(f"group {uid} holds tokens of version {group.version}, older than its reserved {version}")
        if not self._algorithm.eta and (newest := newest_version(trajectories)) > version:
            raise RunFailed(f"group {uid} of version {version} holds tokens of version {newest}, though eta is 0")
        payload = await asyncio.to_thread(self._repository.payloads.store, group)
        self._groups[uid] = group
        self._buffers.occupy(uid)
        written = self._repository.finish_group(group, payload, self._buffers.take_changes())
        self._dropped_in_a_row = self._filtered_in_a_row = 0
        self._ended_s = self._now()
        self._changed.set()
        self._fill()
        await written

    async def _drop(self, uid: str, refused: Refusal) -> None:
        self._buffers.delete(uid)
        written = self._repository.drop_group(uid, refused.reason, self._buffers.take_changes())
        del self._began_s[uid], self._draws[uid]
        self._ended_s = self._now()
        if refused.failed:
            _LOG.warning("group %s dropped: %s: %s", uid, refused.reason, refused.told)
        self._dropped_in_a_row += refused.failed
        self._filtered_in_a_row += not refused.failed
        await written
        for num, limit in (
            (self._dropped_in_a_row, MAX_DROPPED_IN_A_ROW),
            (self._filtered_in_a_row, MAX_FILTERED_IN_A_ROW),
        ):
            if num >= limit:
                raise RunFailed(f"{num} groups in a row were dropped, the last one: {refused.reason}: {refused.told}")
        self._fill()
