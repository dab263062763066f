"""From finished groups to a train batch, and the figures of a batch: pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import fmean

from tide_trainer.errors import RunFailed
from tide_trainer.images import check_spans
from tide_trainer.objectives import AdvantageSettings, group_advantages
from tide_trainer.types import Group, Sequence, TrainBatch, Trajectory


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """What a batch is made of.

    Attributes:
        mean_reward: over rewarded trajectories; 0.0 without one.
        success: share of trajectories with a reward above 0.
        mean_turns: turns per trajectory.
        staleness_mean: mean of `V_buf - V_traj` over groups.
        staleness_max: its largest.
        num_breaks: segments beyond the first of each trajectory: a turn went on from nothing that was captured.
        num_sampled_tokens: tokens that the engine sampled: what goodput counts.
    """

    mean_reward: float
    success: float
    mean_turns: float
    staleness_mean: float
    staleness_max: int
    num_breaks: int
    num_sampled_tokens: int


def train_batch(
    groups: Iterable[Group],
    settings: AdvantageSettings,
    learning_rate: float | None = None,
    placeholder_id: int | None = None,
) -> TrainBatch:
    """One sequence per segment, each with its trajectory's advantage; trajectories without a reward do not train.

    Args:
        groups: finished groups.
        settings: how advantages are made.
        learning_rate: of the update; None: the configured one.
        placeholder_id: of the model's images; None for a model without images.

    Raises:
        RunFailed: a segment's images do not fit its ids; such a batch would train on other pixels than were seen.
    """
    sequences: list[Sequence] = []
    for group in groups:
        rewarded = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
        rewards = [trajectory.reward for trajectory in rewarded if trajectory.reward is not None]
        for trajectory, advantage in zip(rewarded, group_advantages(rewards, settings), strict=True):
            for number, segment in enumerate(trajectory.segments):
                try:
                    check_spans(segment.token_ids, segment.images, placeholder_id)
                except ValueError as error:
                    raise RunFailed(f"segment {number} of trajectory {trajectory.uid}: {error}") from error
                sequences.append(
                    Sequence(segment.token_ids, segment.sampled, segment.logprobs, advantage, segment.images)
                )
    return TrainBatch("policy", tuple(sequences), learning_rate)


def batch_figures(groups: Seq[Group], buffer_version: int) -> BatchFigures:
    """The figures of the groups that the train step at `buffer_version` consumes."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    staleness = [buffer_version - group.version for group in groups]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    return BatchFigures(
        mean_reward=fmean(rewards) if rewards else 0.0,
        success=success_rate(trajectories),
        mean_turns=fmean(trajectory.turns for trajectory in trajectories) if trajectories else 0.0,
        staleness_mean=fmean(staleness) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
        num_breaks=sum(max(0, len(trajectory.segments) - 1) for trajectory in trajectories),
        num_sampled_tokens=sum(sum(segment.sampled) for t in trajectories for segment in t.segments),
    )


def success_rate(trajectories: Seq[Trajectory]) -> float:
    """Share of rewarded trajectories whose reward is above 0; those without a reward are left out."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    return fmean(reward > 0 for reward in rewards) if rewards else 0.0


def newest_version(trajectories: Iterable[Trajectory]) -> int:
    """The newest model version that sampled any token; -1 without one."""
    versions = (version for one in trajectories for segment in one.segments for version in segment.versions)
    return max(versions, default=-1)
