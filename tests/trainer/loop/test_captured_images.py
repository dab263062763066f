"""What the router captured is looked at on its arrival: images that do not fit fail the attempt, and never train."""

from __future__ import annotations

import pytest

from tide_trainer.loop.shell_task import ShellTask, to_trajectory
from tide_trainer.segments import segment_data
from tide_trainer.types import ImageSpan, Prompt, Segment

PAD = 9
DONE = {"outcome": "completed", "reward": 1.0, "turns": 1, "messages": [], "metrics": {}}
SPAN = ImageSpan(1, 2, "a" * 64)


def segment(*images: ImageSpan) -> dict:
    ids = (1, PAD, PAD, 2, 3)
    return segment_data(Segment(ids, (False,) * 4 + (True,), (0.0,) * 4 + (-0.5,), (-1,) * 4 + (0,), images))


def task() -> ShellTask:
    prompt = Prompt("train/1", "screens", {}, 1, "train")
    return ShellTask("run.g.0", "g/0", "g", 0, 0, prompt, "train", None, "a key that is secret")


async def test_images_that_fit_come_through():
    trajectory = to_trajectory(task(), {"segments": [segment(SPAN)]}, DONE)
    assert (trajectory.outcome, trajectory.reward) == ("completed", 1.0)
    assert [one.images for one in trajectory.segments] == [(SPAN,)]


@pytest.mark.parametrize("wrong", [ImageSpan(1, 1, "a" * 64), ImageSpan(2, 2, "a" * 64), ImageSpan(1, 2, "screenshot")])
async def test_images_that_do_not_fit_are_an_infrastructure_failure_with_its_place(wrong, caplog):
    trajectory = to_trajectory(task(), {"segments": [segment(SPAN), segment(wrong)]}, DONE)
    assert (trajectory.outcome, trajectory.reward, trajectory.segments) == ("infrastructure", None, ())
    assert "run.g.0" in trajectory.metrics["error"]
    assert any(word in trajectory.metrics["error"] for word in ("placeholder", "digest"))
    assert "not whole" in caplog.text
