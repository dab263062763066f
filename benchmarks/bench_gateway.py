"""What a turn through the gateway costs beside the same environment server alone: `make bench-gateway`.

One client plays tasks of 20 turns against a plain FastAPI environment server alone (the baseline), and through
gateways on SQLite (synchronous=NORMAL, and FULL beside it) and PostgreSQL with the same server program behind them;
then all of it with the SDK's own server. Rounds visit one after the other, so that the machine's noise meets all alike,
and what is not being measured is frozen. Every turn's intent and result are counted in the databases, also after a
kill -9. The last line is JSON: {"name", "value", "unit", "goal", "holds", "details"}; the value is the gateway's CPU.

    make bench-gateway ARGS="--quick"               one short round on SQLite, no goal
    make bench-gateway ARGS="--servers fastapi --routes alone,sqlite --loads 32"
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway_evidence import killed_account, rows_account
from gateway_load import Client
from gateway_plan import Plan
from gateway_report import GATEWAY_CPU_MS, GOAL_LOAD, Row, Rows, goals, rounded, table, verdicts
from gateway_sides import ALONE, ROUTES, SERVERS, Side, open_sides, without_missing

ROUNDS = 3
MAX_S = 330.0
QUIET_CORES = 0.2


@dataclass(frozen=True, slots=True)
class LoadKind:
    """A load of the table: tasks at once, seconds measured, and what is special about it; words as in `Plan`."""

    tasks: int
    window_s: float
    min_turns: int = 0
    observation_chars: int = 200
    pausers: int = 0


LOADS = {
    "1": LoadKind(1, 1.5),
    "32": LoadKind(32, 3.0),
    # Long enough for a whole task of each slot, so that their turns can be compared.
    "256": LoadKind(256, 4.0, min_turns=20),
    "200KB": LoadKind(32, 2.0, observation_chars=200_000),
    "32+pauses": LoadKind(32, 3.0, pausers=2),
}
"""`200KB` and `32+pauses` have 32 tasks too."""


def main() -> int:
    """Run the benchmark; returns the exit code."""
    arguments = parse_arguments()
    # Ends what runs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="tide-bench-", dir=arguments.directory))
    measured = False
    try:
        result = measure(arguments, folder)
        measured = True
    finally:
        if measured:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"the logs are in {folder}")
    line = json.dumps(result)
    if arguments.output is not None:
        arguments.output.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return 0


def say(text: str) -> None:
    """Tell the progress."""
    print(f"bench-gateway: {text}", file=sys.stderr, flush=True)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything that was asked for, print the table, and return the result."""
    routes, missing = without_missing(arguments.routes)
    if missing:
        say(missing)
    began_s = time.monotonic()
    rows: list[Row] = []
    with Client() as client, open_sides(arguments.servers, routes, folder, client) as sides:
        say(f"{len(sides)} sides are up after {time.monotonic() - began_s:.0f} s; {len(os.sched_getaffinity(0))} cores")
        num_rounds = 0
        while num_rounds < arguments.rounds:
            round_s = -time.monotonic()
            for load in arguments.loads:
                rows += [_row(client, side, load, num_rounds, arguments) for side in sides if _fits(side, load)]
            round_s += time.monotonic()
            num_rounds += 1
            spent_s = time.monotonic() - began_s
            say(f"round {num_rounds} of {arguments.rounds} is over after {spent_s:.0f} s")
            if num_rounds < arguments.rounds and spent_s + round_s > arguments.max_s:
                say(f"another round would take it beyond {arguments.max_s:g} s (--max-s): this was the last")
                break
        evidence = _evidence(client, sides)
    found = Rows(rows)
    figures = {place: found.figures(*place) for place in found.places()}
    durable = all(account["holds"] for account in evidence.values()) if evidence else None
    told = goals(figures, durable)
    others_cores = statistics.median(row.taken.others_cores for row in rows)
    print(f"{table(figures)}\n{verdicts(told)}", flush=True)
    if others_cores > QUIET_CORES:
        say(f"other processes kept {others_cores:.1f} cores busy: these are not the figures of an idle machine")
    return _result(arguments, told) | {
        "details": {
            "goals": rounded(told),
            "rows": {" ".join(place): rounded(one) for place, one in figures.items()},
            "evidence": evidence,
            "rounds": num_rounds,
            "cores": len(os.sched_getaffinity(0)),
            "others_cores": round(others_cores, 2),
            "command": " ".join(["python", *sys.argv]),
            "missing": missing,
        }
    }


def _fits(side: Side, load: str) -> bool:
    if LOADS[load].pausers:
        return side.server == SERVERS[0] and side.route in ("sqlite", "postgres")
    return side.route != "sqlite-full" or load in ("1", "32")


def _row(client: Client, side: Side, load: str, number: int, arguments: argparse.Namespace) -> Row:
    kind = LOADS[load]
    plan = Plan(
        side.url,
        f"{side.name}/{load}/{number}",
        tasks=kind.tasks,
        min_turns=kind.min_turns,
        observation_chars=kind.observation_chars,
        warm_s=arguments.warm_s,
        window_s=arguments.window_s or kind.window_s,
        pausers=kind.pausers,
        processes=side.processes,
    )
    side.thaw()
    try:
        taken = client.play(plan)
    finally:
        side.freeze()
    side.all_turns += taken.all_turns
    row = Row(number, side.server, side.route, load, taken)
    cpu = ", ".join(f"{name} {row.cpu_ms(name) or 0.0:.2f}" for name in taken.cpu_s)
    cpu += f"; {taken.others_cores:.1f} cores taken by others"
    say(f"{side.server:<7} {side.route:<11} {load:>9}: {row.turns_per_s:6.0f} turns/s; CPU ms a turn: {cpu}")
    return row


def _evidence(client: Client, sides: Sequence[Side]) -> dict[str, dict[str, Any]]:
    """By gateway: its rows against the turns that it answered, and for one of each database after a kill -9 too."""
    found: dict[str, dict[str, Any]] = {}
    for side in sides:
        if side.cluster is not None:
            side.thaw()
            found[side.name] = rows_account(side)
            if side.server == SERVERS[0]:
                found[f"{side.name} after kill -9"] = killed_account(client, side)
    for name, account in found.items():
        say(f"{name}: {account}")
    return found


def _result(arguments: argparse.Namespace, told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    holds = [one["holds"] for one in told.values()]
    value = told["gateway_cpu_ms_per_turn"]["value"]
    return {
        "name": "gateway",
        "value": value if value is None else round(value, 4),
        "unit": f"ms of the gateway's CPU a turn at {GOAL_LOAD} tasks on SQLite",
        "goal": GATEWAY_CPU_MS,
        # A part that was not measured leaves it open, unless another one fails already.
        "holds": None if arguments.quick else False if False in holds else None if None in holds else True,
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what is wrong with it ends the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of half a second each, FastAPI and SQLite only")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"figures are medians over them; default: {ROUNDS}")
    parser.add_argument(
        "--max-s", type=float, default=MAX_S, help=f"no round begins that would end later; default: {MAX_S:g}"
    )
    parser.add_argument("--servers", type=_some_of(SERVERS), default=list(SERVERS), help=f"of {','.join(SERVERS)}")
    parser.add_argument("--routes", type=_some_of(ROUTES), default=list(ROUTES), help=f"of {','.join(ROUTES)}")
    parser.add_argument("--loads", type=_some_of(LOADS), default=list(LOADS), help=f"of {','.join(LOADS)}")
    parser.add_argument("--window-s", type=float, help="seconds of each measurement; default: as each load needs")
    parser.add_argument("--warm-s", type=float, default=0.4, help="seconds before each; default: 0.4")
    parser.add_argument("--directory", type=Path, help="where files are made; default: the temporary folder")
    parser.add_argument("--output", type=Path, help="file that takes the last line too")
    found = parser.parse_args(argv)
    if found.rounds < 1 or (found.window_s is not None and found.window_s <= 0) or found.warm_s < 0:
        parser.error("--rounds must be at least 1, --window-s above 0, --warm-s not below")
    if found.quick:
        found.rounds, found.window_s, found.warm_s = 1, 0.5, 0.1
        found.servers, found.routes = ["fastapi"], [ALONE, "sqlite"]
    return found


def _some_of(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        asked = text.split(",")
        if unknown := [name for name in asked if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return [name for name in known if name in asked]

    return parse


if __name__ == "__main__":
    sys.exit(main())
