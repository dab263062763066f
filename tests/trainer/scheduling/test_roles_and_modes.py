"""The fixed split and the one mode, where ERS and RA2P will stand."""

from __future__ import annotations

from tide_trainer.scheduling.modes import Mode, ModeView, choose_mode
from tide_trainer.scheduling.roles import RankRole, RoleView, plan_roles
from tide_trainer.types import RankId, Role

ACTOR, OLD, NEW, DEAD = (RankId("w", index) for index in range(4))


def test_the_fixed_split_moves_nobody_and_names_who_syncs() -> None:
    view = RoleView(
        ranks=(
            RankRole(ACTOR, Role.ACTOR, 5),
            RankRole(OLD, Role.ROLLOUT, 4),
            RankRole(NEW, Role.ROLLOUT, 5),
            RankRole(DEAD, Role.ROLLOUT, 3, alive=False),
        ),
        version=5,
        num_ready_groups=3,
        batch_size=16,
    )
    plan = plan_roles(view)
    assert plan.roles == {ACTOR: Role.ACTOR, OLD: Role.ROLLOUT, NEW: Role.ROLLOUT}
    assert plan.moves == {}
    assert plan.sync == (OLD,)
    assert plan.reason == "fixed split: 1 actor, 0 ref, 2 rollout; left out as dead: w:3"


def test_the_mode_is_colocated_with_its_reason() -> None:
    choice = choose_mode(ModeView(num_ready_microbatches=2, num_microbatches=8, num_ref_ranks=0))
    assert choice.mode is Mode.COLOCATED
    assert "2 of 8 micro-batches ready" in choice.reason
