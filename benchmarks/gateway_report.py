"""What bench_gateway makes of its measurements: figures of each row, the table, and whether the goals hold. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_plan import Taken

GOAL_LOAD = "32"
GATEWAY_CPU_MS = 0.6
OF_BASELINE = 0.60
STRETCH_OF_BASELINE = 0.75
SDK_OF_BASELINE = 1.0
PAUSE_MS = 20.0
WARM_START_MS = 500.0
STARVED_SHARE = 0.5
"""A slot whose turns come at less than this share of the median slot's pace is starved."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: a server, how it was reached, and under which load.

    Attributes:
        round: from 0; rows of one round are compared with each other.
        server, route, load: what was measured.
        taken: what came of it.
    """

    round: int
    server: str
    route: str
    load: str
    taken: Taken

    @property
    def turns_per_s(self) -> float:
        """Turns answered in a second of the window."""
        return self.taken.turns / self.taken.window_s

    def cpu_ms(self, process: str) -> float | None:
        """Milliseconds of CPU a turn, starts and ends of the tasks included; None without such a process or a turn."""
        used_s = self.taken.cpu_s.get(process)
        return None if used_s is None or not self.taken.turns else 1000.0 * used_s / self.taken.turns


def percentile_ms(values_s: Sequence[float], percent: int) -> float | None:
    """That percentile in milliseconds, None of nothing."""
    if not values_s:
        return None
    if len(values_s) == 1:
        return 1000.0 * values_s[0]
    return 1000.0 * statistics.quantiles(values_s, n=100, method="inclusive")[percent - 1]


class Rows:
    """All rows of a run, and their medians over the rounds."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._by_place = {(row.round, row.server, row.route, row.load): row for row in rows}

    def places(self) -> list[tuple[str, str, str]]:
        """(server, route, load) in the order in which they were measured."""
        return list(dict.fromkeys((row.server, row.route, row.load) for row in self.rows))

    def of(self, server: str, route: str, load: str) -> list[Row]:
        """The rows of one place, one of each round."""
        return [row for row in self.rows if (row.server, row.route, row.load) == (server, route, load)]

    def figures(self, server: str, route: str, load: str) -> dict[str, Any]:
        """The medians over the rounds; None for what was not measured.

        `of_baseline` compares with FastAPI alone, `added_*` with the same server alone, each within its round.
        """
        rows = self.of(server, route, load)

        def middle(figure: Callable[[Row], float | None]) -> float | None:
            found = [value for value in map(figure, rows) if value is not None]
            return statistics.median(found) if found else None

        def of_baseline(row: Row) -> float | None:
            base = self._by_place.get((row.round, "fastapi", "alone", load))
            return row.turns_per_s / base.turns_per_s if base is not None and base.taken.turns else None

        def added_ms(row: Row, percent: int) -> float | None:
            base = self._by_place.get((row.round, server, "alone", load))
            mine = percentile_ms(row.taken.turn_s, percent)
            its = None if base is None else percentile_ms(base.taken.turn_s, percent)
            return None if mine is None or its is None else mine - its

        found: dict[str, Any] = {
            "turns_per_s": middle(lambda row: row.turns_per_s),
            "of_baseline": middle(of_baseline),
            "turn_p50_ms": middle(lambda row: percentile_ms(row.taken.turn_s, 50)),
            "turn_p99_ms": middle(lambda row: percentile_ms(row.taken.turn_s, 99)),
            "added_p50_ms": middle(lambda row: added_ms(row, 50)),
            "added_p99_ms": middle(lambda row: added_ms(row, 99)),
            "start_p50_ms": percentile_ms([one for row in rows for one in row.taken.start_s], 50),
            "start_p99_ms": percentile_ms([one for row in rows for one in row.taken.start_s], 99),
            "others_cores": middle(lambda row: row.taken.others_cores),
            "cpu_ms_per_turn": {name: middle(lambda row, name=name: row.cpu_ms(name)) for name in _processes(rows)},
        }
        if route == "alone":
            del found["added_p50_ms"], found["added_p99_ms"]
        if any(len(row.taken.progress) > 1 for row in rows):
            found["progress"] = progress([row.taken for row in rows])
        if any(row.taken.pause_s for row in rows):
            pauses_s = [one for row in rows for one in row.taken.pause_s]
            found["pauses"] = len(pauses_s)
            found["pause_p50_ms"], found["pause_p99_ms"] = percentile_ms(pauses_s, 50), percentile_ms(pauses_s, 99)
        return found


def progress(taken: Sequence[Taken]) -> dict[str, Any]:
    """How evenly the slots got on.

    Returns:
        `min`, `median` and `max` turns of a slot in the round where they differ most, with the time of starts;
        `starved`, over all rounds, is how many slots got on with their turns at under half of the median slot's pace.
    """
    worst = min(taken, key=lambda one: min(one.progress) / max(1.0, statistics.median(one.progress)))
    return {
        "min": min(worst.progress),
        "median": statistics.median(worst.progress),
        "max": max(worst.progress),
        "starved": sum(
            pace_s * STARVED_SHARE > statistics.median(one.pace_s) for one in taken for pace_s in one.pace_s
        ),
    }


def _processes(rows: Sequence[Row]) -> list[str]:
    order = ("gateway", "environment", "postgres", "client")
    found = {name for row in rows for name in row.taken.cpu_s}
    return sorted(found, key=order.index)


def goals(figures: Mapping[tuple[str, str, str], Mapping[str, Any]], durable: bool | None) -> dict[str, Any]:
    """Every goal with its value, its limit, and whether it holds; None where it was not measured.

    Args:
        figures: of each (server, route, load), as `Rows.figures` gives them.
        durable: whether every turn had its rows, also those before a kill; None where it was not looked at.
    """

    def value(route: str, load: str, *names: str, server: str = "fastapi") -> Any:
        found: Any = figures.get((server, route, load))
        for name in names:
            found = None if found is None else found.get(name)
        return found

    def goal(found: float | None, limit: float, *, at_most: bool) -> dict[str, Any]:
        holds = None if found is None else found <= limit if at_most else found >= limit
        return {"value": found, "at_most" if at_most else "at_least": limit, "holds": holds}

    starved = [
        one["progress"]["starved"]
        for (_, route, load), one in figures.items()
        if load == "256" and route != "alone" and "progress" in one
    ]
    return {
        "gateway_cpu_ms_per_turn": goal(
            value("sqlite", GOAL_LOAD, "cpu_ms_per_turn", "gateway"), GATEWAY_CPU_MS, at_most=True
        ),
        "of_baseline": goal(value("sqlite", GOAL_LOAD, "of_baseline"), OF_BASELINE, at_most=False)
        | {"stretch": STRETCH_OF_BASELINE},
        "sdk_server_of_baseline": goal(
            value("sqlite", GOAL_LOAD, "of_baseline", server="sdk"), SDK_OF_BASELINE, at_most=False
        ),
        "starved_at_256": goal(float(sum(starved)) if starved else None, 0.0, at_most=True),
        "pause_p99_ms": goal(value("sqlite", "32+pauses", "pause_p99_ms"), PAUSE_MS, at_most=True),
        "warm_start_p99_ms": goal(value("sqlite", GOAL_LOAD, "start_p99_ms"), WARM_START_MS, at_most=True),
        "every_turn_stored": {"value": durable, "holds": durable},
    }


def table(figures: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> str:
    """The medians as lines of text."""
    heads = ("server", "through", "tasks", "turns/s", "of base", "p50 ms", "p99 ms", "+p50", "+p99")
    heads += ("gateway", "environ.", "postgres", "client", "others")
    lines: list[tuple[str, ...]] = [heads]
    for (server, route, load), one in figures.items():
        cpu = one["cpu_ms_per_turn"]
        cells = [one["turns_per_s"], one["of_baseline"], one["turn_p50_ms"], one["turn_p99_ms"]]
        cells += [one.get("added_p50_ms"), one.get("added_p99_ms")]
        places = (0, 2, 1, 1, 1, 1)
        texts = [_text(cell, digits) for cell, digits in zip(cells, places, strict=True)]
        parts = [_text(cpu.get(name), 2) for name in ("gateway", "environment", "postgres", "client")]
        lines.append((server, route, load, *texts, *parts, _text(one["others_cores"], 1)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    left = 3
    told = [
        "gateway ... client: CPU ms a turn; +p50, +p99: to the same server alone; of base: turns/s to FastAPI alone;",
        "others: cores that processes outside of this benchmark kept busy, which spoils times, and CPU less.",
    ]
    for line in lines:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        told.append("  ".join(cells).rstrip())
    return "\n".join(told)


def verdicts(told: Mapping[str, Mapping[str, Any]]) -> str:
    """The goals as lines of text."""
    lines: list[str] = []
    for name, one in told.items():
        word = {True: "holds", False: "FAILS", None: "not measured"}[one["holds"]]
        limit = "".join(f", {key.replace('_', ' ')} {one[key]:g}" for key in ("at_most", "at_least") if key in one)
        value = f"{one['value']:.3f}" if isinstance(one["value"], float) else str(one["value"])
        lines.append(f"{word:<12} {name}: {value}{limit}")
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """Plain data with four digits after the point."""
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
