"""Which rank does what: the role planner. A fixed split stands where Elastic Resource Scaling will stand.

Source: TideRL section 5.2. A plan is made right after the Actor update and before the weights are synchronised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tide_trainer.types import RankId, Role


@dataclass(frozen=True, slots=True)
class RankRole:
    """A rank as it stands.

    Attributes:
        rank: its id.
        role: what it does now.
        version: model version that it holds; -1 before the first.
        alive: False for a quarantined rank: it takes no part in the sync.
    """

    rank: RankId
    role: Role
    version: int
    alive: bool = True


@dataclass(frozen=True, slots=True)
class RoleView:
    """What the planner sees between two train steps.

    Attributes:
        ranks: all ranks, dead ones included.
        version: the trainer's model version.
        num_ready_groups: complete groups in the buffer.
        batch_size: groups of an ideal train batch (B_ideal).
    """

    ranks: tuple[RankRole, ...]
    version: int
    num_ready_groups: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The roles of the next train step.

    Attributes:
        roles: one role per live rank.
        moves: ranks whose role changes.
        sync: live Rollout ranks whose weights are not at the trainer's version; they take part in the next sync.
        reason: why.
    """

    roles: Mapping[RankId, Role]
    reason: str
    moves: Mapping[RankId, Role] = field(default_factory=dict[RankId, Role])
    sync: tuple[RankId, ...] = ()


def plan_roles(view: RoleView) -> RolePlan:
    """The fixed split: every live rank keeps its role.

    Actor ranks never move, so that no process group is ever rebuilt; only Ref and Rollout ranks may, once it is built.
    """
    live = [rank for rank in view.ranks if rank.alive]
    stale = tuple(rank.rank for rank in live if rank.role is Role.ROLLOUT and rank.version != view.version)
    dead = [str(rank.rank) for rank in view.ranks if not rank.alive]
    reason = f"fixed split: {', '.join(f'{sum(r.role is role for r in live)} {role}' for role in Role)}"
    if dead:
        reason += f"; left out as dead: {', '.join(dead)}"
    return RolePlan({rank.rank: rank.role for rank in live}, reason, sync=stale)
