"""The Stuck clock: only waiting counts, pauses do not, and the limit grows with the environment's episodes."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.staleness_stuck import Awaited, StuckClock, stuck_limit_s


def awaited(*entries: str, paused_s: float = 0.0, limit_s: float = 60.0) -> dict[str, Awaited]:
    return {entry: Awaited(paused_s, limit_s) for entry in entries}


def test_an_entry_is_overdue_once_it_was_waited_for_as_long_as_its_limit() -> None:
    clock = StuckClock()
    assert clock.overdue(awaited("a", "b"), 0.0) == ()
    assert clock.overdue(awaited("a", "b"), 59.9) == ()
    assert clock.overdue(awaited("a", "b"), 60.0) == ("a", "b")
    assert clock.overdue(awaited("b"), 61.0) == ("b",)


def test_time_in_which_nobody_waits_does_not_count() -> None:
    clock = StuckClock()
    clock.overdue(awaited("a"), 0.0)
    assert clock.overdue({}, 50.0) == ()
    assert clock.overdue(awaited("a"), 100.0) == ()
    clock.clear()
    assert clock.overdue(awaited("a"), 165.0) == ()
    assert clock.overdue(awaited("a"), 225.0) == ("a",)


def test_pauses_do_not_count_and_earlier_ones_buy_no_time() -> None:
    clock = StuckClock()
    assert clock.overdue(awaited("a", paused_s=1000.0), 0.0) == ()
    assert clock.overdue(awaited("a", paused_s=1030.0), 60.0) == ()
    assert clock.overdue(awaited("a", paused_s=1030.0), 89.0) == ()
    assert clock.overdue(awaited("a", paused_s=1030.0), 90.0) == ("a",)
    # The member that was paused longest has ended: what the others were paused is less.
    assert clock.overdue(awaited("a", paused_s=3.0), 91.0) == ("a",)


@pytest.mark.parametrize(("episode_s", "limit_s"), [(None, 60.0), (10.0, 60.0), (100.0, 300.0)])
def test_the_limit_grows_with_the_environments_episodes(episode_s: float | None, limit_s: float) -> None:
    assert stuck_limit_s(60.0, 3.0, episode_s) == limit_s
