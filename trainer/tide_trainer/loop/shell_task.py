"""What the scheduler's shell keeps of one task, and its sums."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tide_trainer.scheduling.plan import TaskEntry
from tide_trainer.segments import read_segment
from tide_trainer.settings import RolloutSettings, TrainerSettings
from tide_trainer.types import Kind, Prompt, RankId, Trajectory

_LOG = logging.getLogger(__name__)


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class ShellTask:
    """One attempt under the scheduler.

    Attributes:
        session: its name at the router and the scheduler.
        call: the agent's call that waits for a grant, None without one.
        version: the model version that all of it must be sampled at; None: the versions as they come.
        order_key: of training, the staleness buffer that its group is reserved in when it begins; the earliest goes
            first.
        rank: of its last granted call.
        asked: the latest call's prompt tokens, and the most that it may generate.
        granted: the call that went to an engine and has not ended, None without one.
        recalled: a call that was taken back before it was granted: its task was just being resumed.
        task_id: its id at the gateway, once started.
        epoch: the last epoch sent to the gateway.
        control: keeps its `/pause` and `/resume` calls in order.
        began_s: Unix time.
    """

    session: str
    uid: str
    group: str
    member: int
    attempt: int
    prompt: Prompt
    kind: Kind
    temperature: float | None
    api_key: str = field(repr=False)
    version: int | None = None
    order_key: int = 0
    rank: RankId | None = None
    call: str | None = None
    asked: tuple[int, int] = (0, 0)
    granted: str | None = None
    recalled: str | None = None
    epoch: int = 0
    task_id: asyncio.Future[str] = field(default_factory=_future)
    result: asyncio.Future[Trajectory] = field(default_factory=_future)
    control: asyncio.Lock = field(default_factory=asyncio.Lock)
    playing: asyncio.Task[None] | None = None
    began_s: float = field(default_factory=time.time)

    def entry(self, settings: TrainerSettings) -> TaskEntry:
        """The task as the scheduler knows it."""
        train, algorithm = self.kind == "train", settings.algorithm
        return TaskEntry(
            task=self.session,
            # Prompts of an evaluation share nothing: neither a prefix nor a rank that holds it.
            group=self.group if train else self.uid,
            kind=self.kind,
            num_siblings=algorithm.group_size + algorithm.spare_siblings if train else 1,
            environment=self.prompt.environment,
            order_key=self.order_key,
            version=self.version,
        )

    def label_version(self, newest: int) -> int:
        """The version that its recording is filed under: its own, or the newest one."""
        return newest if self.version is None else self.version

    def sampling(self, rollout: RolloutSettings) -> dict[str, Any]:
        """The defaults of its calls at the router."""
        return {
            "temperature": rollout.temperature if self.temperature is None else self.temperature,
            "max_new_tokens": rollout.max_new_tokens,
            "kind": self.kind,
        }

    def spec(self, run: str, deadline_s: float) -> dict[str, Any]:
        """What the agent worker starts at the gateway."""
        return {
            "environment": self.prompt.environment,
            "key": f"{run}/{self.uid}",
            "attempt": self.attempt,
            "task": dict(self.prompt.task),
            "seed": self.prompt.seed,
            "split": self.prompt.split,
            "kind": self.kind,
            "deadline_s": deadline_s,
            # The scheduler has the queue: a gateway without a place must not block a worker.
            "waits_for_place": False,
        }


@dataclass
class ShellFigures:
    """Sums since the start of the shell; `since` gives the share of a train step.

    Attributes:
        idle_s: seconds in which no task was there to run: rollout waited at the staleness bound.
        num_failed_controls: `/pause` and `/resume` calls that failed for good.
        scheduler_cpu_s: CPU seconds in the pure scheduler.
        num_requeues: tasks put back into the queue, because the gateway had no place.
        num_aborts: calls that were taken back from their engine.
        dropped_tokens: what these had sampled by then; nobody ever saw it.
    """

    num_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    idle_s: float = 0.0
    num_pauses: int = 0
    num_resumes: int = 0
    num_failed_controls: int = 0
    scheduler_cpu_s: float = 0.0
    num_requeues: int = 0
    num_aborts: int = 0
    dropped_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over prompt tokens, summed before dividing."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add_turn(self, footprint: Mapping[str, Any]) -> None:
        """Adds one turn's tokens."""
        self.num_turns += 1
        self.prompt_tokens += footprint["prompt_tokens"]
        self.cached_tokens += footprint["cached_tokens"]
        self.completion_tokens += footprint["completion_tokens"]

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Counts the CPU time of its body as the scheduler's."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.scheduler_cpu_s += time.thread_time() - began_s

    def since(self, earlier: ShellFigures) -> ShellFigures:
        """The difference to an earlier copy."""
        names = self.__dataclass_fields__
        return ShellFigures(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


def to_trajectory(task: ShellTask, captured: Mapping[str, Any] | None, done: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a finished attempt: the router's captured tokens and the worker's account.

    Segments that are not whole, or whose images do not fit their ids, are an infrastructure failure: nothing of the
    attempt trains, and its error names the place.
    """
    try:
        segments = tuple(read_segment(segment) for segment in (captured or {}).get("segments", ()))
    except ValueError as error:
        words = f"the router's account of {task.session} is not whole: {error}"
        _LOG.error("%s", words)
        segments, done = (), {**done, "outcome": "infrastructure", "reward": None, "error": words}
    versions = [version for segment in segments for version in segment.versions if version >= 0]
    metrics = dict(done.get("metrics") or {})
    for name in ("error", "cleanup_errors"):
        if done.get(name):
            metrics[name] = done[name]
    return Trajectory(
        uid=task.uid,
        group=task.group,
        member=task.member,
        segments=segments,
        reward=done.get("reward"),
        outcome=str(done["outcome"]),
        turns=int(done.get("turns") or 0),
        version=min(versions, default=-1),
        metrics=metrics,
        messages=tuple(done.get("messages") or ()),
        rewards=tuple(done.get("rewards") or ()),
    )
