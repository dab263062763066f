"""What one gateway process has counted since it began; `GET /metrics` shows it with what the rows say now.

No label has a task's, a caller's or an instance's name: their number has no bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import Metric

from tide_gateway.admission import Reason
from tide_gateway.instruments import Counter, Histogram
from tide_gateway.lifecycle import SUPERSEDED
from tide_sdk.clocks import ClockName
from tide_sdk.errors import CODES
from tide_sdk.wire import Outcome

_LAG_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CHANGES_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CLOCKS = tuple(clock.value for clock in ClockName if clock is not ClockName.END)
_CAPS = ("max_pause_s", "max_wall_s")
_KNOWN_REASONS = frozenset(CODES) | {SUPERSEDED, "owner_lost", *_CAPS}


class Metrics:
    """The counts. They belong to one event loop, and are as many as the registered environments allow.

    Args:
        environments: the registered ones, whose counts are there from the start: a rate needs a zero to begin with.

    Attributes:
        requests: by path, as in the documentation, and status.
        num_in_flight: requests that are being answered.
        calls: the five calls from their header to their answer, those that succeeded.
        environment_calls: the environment server's share of them.
        refused: starts that got 429.
        started, turns, ended, expired: what was committed, by this replica.
        paused_s: seconds of pauses that are over.
        launches, launch_failures: of environment servers.
        orphans: what existed without a row and was destroyed.
        commits, commit_changes, commit_failures: groups of changes.
        lag: how late the event loop was.
    """

    def __init__(self, environments: Iterable[str] = ()) -> None:
        self.num_in_flight = 0
        self.requests = Counter("tide_gateway_requests_total", "HTTP requests answered.", "path", "status")
        words = "Seconds from a call's header to its answer, of calls that succeeded."
        self.calls = Histogram("tide_gateway_call_seconds", words, "call", "environment")
        words = "Seconds that environment servers took to answer: their share of tide_gateway_call_seconds."
        self.environment_calls = Histogram("tide_gateway_environment_call_seconds", words, "call", "environment")
        words = "Starts that were refused with 429."
        self.refused = Counter("tide_gateway_starts_refused_total", words, "environment", "reason")
        self.started = Counter("tide_gateway_tasks_started_total", "Tasks that got ready.", "environment")
        self.turns = Counter("tide_gateway_turns_total", "Turns answered by an environment.", "environment")
        words = "Tasks that ended."
        self.ended = Counter("tide_gateway_tasks_ended_total", words, "environment", "outcome", "reason")
        words = "Tasks of which a clock or a cap ran out."
        self.expired = Counter("tide_gateway_tasks_expired_total", words, "environment", "limit")
        words = "Seconds that tasks were paused, counted when the pause is over."
        self.paused_s = Counter("tide_gateway_paused_seconds_total", words, "environment")
        words = "Seconds until an environment server was ready, of launches that succeeded."
        self.launches = Histogram("tide_gateway_launch_seconds", words, "environment")
        words = "Environment servers that did not get ready."
        self.launch_failures = Counter("tide_gateway_launch_failures_total", words, "environment")
        words = "Environment servers without a row, found and destroyed."
        self.orphans = Counter("tide_gateway_orphans_removed_total", words, "runtime")
        self.commits = Histogram("tide_gateway_commit_seconds", "Seconds that a group of changes took to be stored.")
        self.commit_changes = Histogram(
            "tide_gateway_commit_changes", "Changes in a group that was stored together.", bounds=_CHANGES_BOUNDS
        )
        words = "Changes that were not stored: conflict (another replica was faster), storage, unknown, other."
        self.commit_failures = Counter("tide_gateway_commit_failures_total", words, "reason")
        words = "Seconds by which the event loop was late."
        self.lag = Histogram("tide_gateway_event_loop_lag_seconds", words, bounds=_LAG_BOUNDS)

        for environment in environments:
            for counter in (self.started, self.turns, self.paused_s, self.launch_failures):
                counter.add(environment, by=0.0)
            for reason in get_args(Reason):
                self.refused.add(environment, reason, by=0.0)
            for limit in (*_CLOCKS, *_CAPS):
                self.expired.add(environment, limit, by=0.0)
        for reason in ("conflict", "storage", "unknown", "other"):
            self.commit_failures.add(reason, by=0.0)

    def collect(self) -> Iterator[Metric]:
        """Everything that was counted, as it is written out."""
        for instrument in vars(self).values():
            if isinstance(instrument, (Counter, Histogram)):
                yield from instrument.collect()


def reason_of(outcome: Outcome) -> str:
    """An outcome's reason as a label: the clock or cap, the contract's code; a caller's own words are `caller`."""
    if outcome.clock is not None:
        return outcome.clock.value
    reason = outcome.reason or ""
    return reason if not reason or reason in _KNOWN_REASONS else "caller"
