"""What bench_gateway asks of its client, and what the client answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from process_times import Processes


class LoadFailed(Exception):
    """An answer was not the contract's, or did not come; no figure of this plan is worth anything."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played.

    Attributes:
        url: `http://host:port` of a gateway or of an environment server.
        key: prefix of the tasks' keys, another one for each plan.
        tasks: tasks at once; each slot starts the next one when its task has ended.
        turns: turns of each task; the first ones are shorter, each by another number, so that starts and ends are
            spread over the window.
        observation_chars: size of each observation.
        warm_s: seconds played before the window, once every slot has begun.
        window_s: seconds that are measured, up to three times as many where turns are few.
        min_turns: turns that the window shall have for each slot on average.
        pausers: further tasks that are paused and resumed all the time and never act.
        processes: whose CPU time is measured, by name.
        until_cut: play until the gateway is gone, and tell how many turns of each task were answered; no window.
    """

    url: str
    key: str
    tasks: int
    turns: int = 20
    observation_chars: int = 200
    warm_s: float = 0.5
    window_s: float = 2.0
    min_turns: int = 0
    pausers: int = 0
    processes: Mapping[str, Processes] = field(default_factory=dict[str, Processes])
    until_cut: bool = False


@dataclass(slots=True)
class Taken:
    """What came of a plan; lists and counts are of the window alone where nothing else is said.

    Attributes:
        window_s: its exact length.
        turns: answered turns.
        all_turns: answered turns of the whole plan.
        turn_s, start_s, pause_s: seconds that each call took.
        progress: turns of each slot.
        pace_s: seconds that a turn of each slot took on average, or that its last one has been waiting, which is more;
            its starts left out. Infinite where it was at no turn at all.
        cpu_s: CPU seconds by process, the client's own among them.
        others_cores: cores that processes outside of this benchmark kept busy; more than a little spoils the times.
        answered: turns answered by task, of the whole plan.
    """

    window_s: float = 0.0
    turns: int = 0
    all_turns: int = 0
    turn_s: list[float] = field(default_factory=list[float])
    start_s: list[float] = field(default_factory=list[float])
    pause_s: list[float] = field(default_factory=list[float])
    progress: list[int] = field(default_factory=list[int])
    pace_s: list[float] = field(default_factory=list[float])
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    others_cores: float = 0.0
    answered: dict[str, int] = field(default_factory=dict[str, int])
