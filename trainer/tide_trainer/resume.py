"""A run that goes on from what a killed, failed or stopped life of it left: its rows, payloads and newest checkpoint.

    checkpoint of version c ── train steps after c are forgotten, their groups are complete again
    rows ── ready ──────────── back into the buffers, with their versions
         ── running, waiting ─ sampled again, as a further sampling of the prompt
         ── tokens above c ─── the versions are lost: sampled again
         ── trained before c, dropped for a reason of their own: stay

Every prompt that was ever taken keeps its one row; prompts go on after the last one taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tide_trainer.backends.whole_files import newest_whole
from tide_trainer.errors import ConfigurationError
from tide_trainer.images import ImageStore
from tide_trainer.loop.batches import newest_version
from tide_trainer.loop.prompts import Draw, prompt_at
from tide_trainer.persistence.payloads import PayloadLost
from tide_trainer.persistence.repository import ENDED_FIRST, RunRepository
from tide_trainer.persistence.resume import Rewind, StoredGroup, StoredRun, read_run, rewind
from tide_trainer.run_directory import RunDirectory
from tide_trainer.scheduling.staleness import StalenessBuffers
from tide_trainer.scheduling.staleness_resume import restore_complete
from tide_trainer.scheduling.staleness_types import EntryRecord
from tide_trainer.settings import TrainerSettings
from tide_trainer.settings_play import TaskSettings
from tide_trainer.types import Group, Prompt, Trajectory

FIXED = ("model", "tasks.environment", "tasks.parameters", "tasks.train_seed", "run.seed", "rollout.engine",
         "train.backend")  # fmt: skip
"""What a run that goes on must not change: its prompts and its checkpoint are of these."""


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on.

    Attributes:
        version: the model version.
        checkpoint: the folder that holds it; None to begin with the model folder's weights.
        position: prompts taken so far.
        again: of these, the ones to sample again.
        reasons: why, by group; a prompt whose row was never written has none.
        buffers: with the complete groups in their places.
        draws: which sampling of its prompt each complete group is.
        groups: the complete groups.
        former_key: with what the last life's tasks begin at the gateway; empty if it had none.
        num_lost_steps: train steps after the checkpoint, which are done again.
        number: 1 for the first time that the run goes on.
    """

    version: int
    checkpoint: str | None
    position: int
    again: tuple[Draw, ...]
    reasons: Mapping[str, str]
    buffers: StalenessBuffers
    draws: Mapping[str, Draw]
    groups: tuple[Group, ...]
    former_key: str
    num_lost_steps: int
    number: int

    def told(self) -> dict[str, Any]:
        """The record of metrics.jsonl."""
        reasons: dict[str, int] = {}
        for reason in self.reasons.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        return {
            "model_version": self.version,
            "num_lost_train_steps": self.num_lost_steps,
            "num_ready_groups": len(self.groups),
            "num_sampled_again": len(self.again),
            "reasons": reasons,
            "number": self.number,
        }


@dataclass(frozen=True, slots=True)
class Life:
    """One process's part of a run: the lock on its folder, and where it goes on; None from the beginning."""

    lock: int | None = None
    resumption: Resumption | None = None


async def resume(settings: TrainerSettings, directory: RunDirectory, repository: RunRepository) -> Resumption:
    """Reads what there is, decides, and brings the rows to the decision; after a crash in it, it can be repeated.

    Raises:
        ConfigurationError: there is no such run, a fixed setting differs, or the checkpoint is newer than the rows.
    """
    stored = await read_run(repository.engine, repository.run)
    if stored is None:
        raise ConfigurationError("--resume", f"{directory.path} holds no run that began; start it without --resume")
    _check_fixed(settings.model_dump(mode="json", exclude_none=True), stored.config)
    found = newest_whole(str(directory.checkpoint))
    checkpoint, version = found if found is not None else (None, 0)
    if version > stored.model_version:
        raise ConfigurationError(
            "--resume",
            f"the checkpoint is of version {version}, the database knows {stored.model_version}: they are not of one "
            "run, or the database is an older copy; put the right one back",
        )
    images = ImageStore(directory.images)
    resumption = await asyncio.to_thread(
        plan, stored, (checkpoint, version), settings, repository.payloads.read, lambda one: images.path(one).is_file()
    )
    numbers = {draw.prompt.uid: draw.sampling for draw in resumption.again}
    again = tuple((uid, reason, numbers[uid]) for uid, reason in resumption.reasons.items())
    ready = tuple(group.uid for group in resumption.groups)
    entries = resumption.buffers.snapshot().entries
    await rewind(repository.engine, repository.run, Rewind(version, ready, again, entries))
    return resumption


def plan(
    stored: StoredRun,
    checkpoint: tuple[str | None, int],
    settings: TrainerSettings,
    read: Callable[[str], Sequence[Trajectory]],
    has_image: Callable[[str], bool],
) -> Resumption:
    """Decides for each prompt what becomes of it.

    Args:
        stored: the rows.
        checkpoint: its folder and model version; without one None and 0.
        settings: may differ from the former ones in what is not `FIXED`.
        read: gives a payload's trajectories, or raises PayloadLost.
        has_image: whether the run's store has an image.
    """
    folder, version = checkpoint
    algorithm, entries = settings.algorithm, {one.entry: one for one in stored.entries}
    complete: dict[str, Group] = {}
    draws: dict[str, Draw] = {}
    records: list[EntryRecord] = []
    again: dict[str, str] = {}
    for group in stored.groups:
        if _is_settled(group, version):
            continue
        draws[group.uid] = _draw(settings.tasks, group)
        oldest = entries[group.uid].version if group.uid in entries else group.version
        trajectories, reason = _payload(group, version, read, has_image)
        if reason:
            again[group.uid] = reason
            continue
        complete[group.uid] = Group(group.uid, draws[group.uid].prompt, tuple(trajectories), group.version)
        former = entries[group.uid].buffer if group.uid in entries else group.buffer_version
        records.append(EntryRecord(group.uid, oldest, version if former is None else former, True))
    buffers = StalenessBuffers(algorithm.eta, algorithm.groups_per_batch, version, algorithm.spare_groups)
    for uid in restore_complete(buffers, records):
        del complete[uid]
        again[uid] = "no place within the staleness bound after a resume"
    buffers.take_changes()
    rows = {group.uid: group for group in stored.groups}
    position = max((_index(uid) for uid in rows), default=-1) + 1
    repeated = [_next_sampling(draws[uid], rows[uid]) for uid in sorted(again, key=_index)]
    lost = [Draw(_prompt(settings.tasks, index)) for index in range(position) if f"train/{index}" not in rows]
    return Resumption(
        version=version,
        checkpoint=folder,
        position=position,
        again=(*repeated, *lost),
        reasons=again,
        buffers=buffers,
        draws={uid: draws[uid] for uid in complete},
        groups=tuple(complete.values()),
        former_key=stored.task_key,
        num_lost_steps=stored.model_version - version,
        number=stored.num_resumes + 1,
    )


def _is_settled(group: StoredGroup, version: int) -> bool:
    """Whether nothing is left to do for a prompt at this version."""
    if group.status == "trained":
        return group.buffer_version is not None and group.buffer_version < version
    return group.status == "dropped" and group.reason != ENDED_FIRST


def _payload(
    group: StoredGroup,
    version: int,
    read: Callable[[str], Sequence[Trajectory]],
    has_image: Callable[[str], bool],
) -> tuple[Sequence[Trajectory], str]:
    """A complete group's trajectories, or why there are none to train."""
    if group.payload_hash is None:
        return (), group.reason if group.status == "waiting" and group.reason else "in flight when the run ended"
    try:
        trajectories = read(group.payload_hash)
    except PayloadLost as error:
        return (), f"lost: {error}"
    if newest_version(trajectories) > version:
        return (), f"tokens of versions above {version}, which are lost"
    spans = (span for one in trajectories for segment in one.segments for span in segment.images)
    if not all(has_image(span.digest) for span in spans):
        return (), "its images are not in the store any more"
    return trajectories, ""


def _draw(tasks: TaskSettings, group: StoredGroup) -> Draw:
    return Draw(_prompt(tasks, _index(group.uid)), group.sampling)


def _next_sampling(draw: Draw, group: StoredGroup) -> Draw:
    """A waiting prompt's number is that of its next sampling already."""
    return draw if group.status == "waiting" else Draw(draw.prompt, draw.sampling + 1)


def _prompt(tasks: TaskSettings, index: int) -> Prompt:
    return prompt_at(tasks, "train", tasks.train_seed, index)


def _index(uid: str) -> int:
    return int(uid.rpartition("/")[2])


def _check_fixed(config: Mapping[str, Any], former: Mapping[str, Any]) -> None:
    for name in FIXED:
        now, then = _value(config, name), _value(former, name)
        if now != then:
            raise ConfigurationError(name, f"is {now!r} and was {then!r}; a run that goes on keeps it: leave it out")


def _value(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
