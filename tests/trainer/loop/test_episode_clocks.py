"""Standing still is counted apart from running, by group and by environment."""

from __future__ import annotations

import pytest

from tide_trainer.loop.episode_clocks import NUM_AVERAGED, EpisodeClocks


class Clock:
    s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def clocks(clock):
    return EpisodeClocks(clock)


def test_waiting_for_admission_and_for_grants_counts_running_does_not(clock, clocks):
    clocks.begin("a", "g", "maze")
    clock.s += 3
    clocks.go("a")
    clock.s += 5
    clocks.stand("a")
    clock.s += 2
    clocks.stand("a")
    assert clocks.paused_s("g") == 5
    clocks.go("a")
    clocks.go("a")
    clock.s += 7
    assert clocks.paused_s("g") == 5
    clocks.end("a", completed=True)
    assert clocks.episode_s("maze") == 12
    assert clocks.paused_s("g") == 0


def test_a_group_counts_the_live_member_that_stood_longest(clock, clocks):
    for member in "ab":
        clocks.begin(member, "g", "maze")
    clocks.begin("c", "other", "maze")
    clocks.go("b")
    clock.s += 4
    assert clocks.paused_s("g") == 4
    clocks.end("a", completed=True)
    assert clocks.paused_s("g") == 0
    assert clocks.paused_s("other") == 4
    assert clocks.paused_s("never heard of") == 0


def test_an_environments_mean_takes_completed_episodes_and_follows_them(clock, clocks):
    assert clocks.episode_s("maze") is None

    def episode(seconds, *, completed):
        clocks.begin("a", "g", "maze")
        clocks.go("a")
        clock.s += seconds
        clocks.end("a", completed=completed)

    episode(900, completed=False)
    assert clocks.episode_s("maze") is None
    for seconds in (10, 20):
        episode(seconds, completed=True)
    assert clocks.episode_s("maze") == 15
    for _ in range(20 * NUM_AVERAGED):
        episode(40, completed=True)
    assert clocks.episode_s("maze") == pytest.approx(40, rel=1e-3)
    assert clocks.episode_s("other") is None


def test_a_task_that_is_over_is_passed_over(clock, clocks):
    clocks.stand("gone")
    clocks.go("gone")
    assert clocks.paused_s("g") == 0
