"""What the role planner sees of a run's ranks between two train steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tide_trainer.scheduling.roles import RankRole, RoleView
from tide_trainer.scheduling.staleness import BufferView
from tide_trainer.types import RankId, Role


def role_view(
    num_actors: int,
    version: int,
    rollout_ranks: Iterable[RankId],
    version_of: Callable[[RankId], int],
    buffers: Iterable[BufferView],
    batch_size: int,
) -> RoleView:
    """The view of a run whose Actor ranks are at `version`.

    Args:
        num_actors: Actor ranks, which all live.
        version: the trainer's model version.
        rollout_ranks: the living ones.
        version_of: the model version that a rollout rank serves.
        buffers: the staleness buffers.
        batch_size: groups of a train step.
    """
    actors = [RankRole(RankId("actor", index), Role.ACTOR, version) for index in range(num_actors)]
    rollout = [RankRole(rank, Role.ROLLOUT, version_of(rank)) for rank in rollout_ranks]
    return RoleView((*actors, *rollout), version, sum(buffer.num_occupied for buffer in buffers), batch_size)
