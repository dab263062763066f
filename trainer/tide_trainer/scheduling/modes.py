"""How Ref and Actor share the training ranks: the mode chooser. One mode stands where RA2P will stand.

Source: TideRL section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Colocated: Ref and Actor take turns on the same ranks. Decoupled: a Ref rank feeds the Actor ranks."""

    COLOCATED = "colocated"
    DECOUPLED = "decoupled"


@dataclass(frozen=True, slots=True)
class ModeView:
    """What the chooser sees when a train step starts.

    Attributes:
        num_ready_microbatches: RAS, micro-batches that are ready now.
        num_microbatches: micro-batches of the whole train step.
        num_ref_ranks: ranks in the Ref role.
    """

    num_ready_microbatches: int
    num_microbatches: int
    num_ref_ranks: int


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode of this train step and why."""

    mode: Mode
    reason: str


def choose_mode(view: ModeView) -> ModeChoice:
    """The one mode that is built: colocated."""
    return ModeChoice(
        Mode.COLOCATED,
        f"only colocated is built; {view.num_ready_microbatches} of {view.num_microbatches} micro-batches ready, "
        f"{view.num_ref_ranks} Ref ranks",
    )
