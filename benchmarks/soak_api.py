"""Thousands of calls made from the OpenAPI document against a real gateway: `make soak-api`.

Rounds of schemathesis, each with another seed: examples, the schemas' edges, random bodies, chains of calls. No answer
may be a 5xx, have a status that the document does not name, or a body that is not its schema's; and the gateway's
memory, descriptors and threads, read from outside after the first and after the last round, may not have grown by more
than the bounds below. The last line is JSON.

    make soak-api ARGS="--rounds 2 --database postgres"
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from soak_common import parser, progress_of, run, settled_usage

# Beside the tests, where soak_common leads.
from api_fuzz import TOKENS, fuzz  # isort: skip
from scripted_gateway import start_gateway  # isort: skip

MAX_GROWTH = {"rss_bytes": 32 * 2**20, "descriptors": 16, "threads": 4}
ROUND_LIMIT_S = 600.0


async def soak(arguments: argparse.Namespace, folder: Path, url: str) -> dict[str, Any]:
    """Round after round, on one gateway."""
    gateway = await asyncio.to_thread(start_gateway, folder, url, TOKENS)
    options = ["--max-examples", str(arguments.examples), "--generation-database", "none"]
    failures: list[str] = []
    num_cases = 0
    try:
        with progress_of("soak-api", arguments.rounds) as show:
            for number in range(arguments.rounds):
                seed = ["--seed", str(arguments.seed + number)]
                found = await asyncio.to_thread(fuzz, gateway.url, folder, options + seed, limit_s=ROUND_LIMIT_S)
                num_cases += found.num_cases
                failures += [str(failure) for failure in found.failures]
                if number == 0:
                    early = await settled_usage([gateway.pid])
                show(number + 1, f"{num_cases} calls, {len(failures)} failures")
        late = await settled_usage([gateway.pid])
    finally:
        code = await asyncio.to_thread(gateway.stop)
    grown = {name: late.as_dict()[name] - value for name, value in early.as_dict().items()}
    too_much = [name for name, bound in MAX_GROWTH.items() if grown[name] > bound]
    faults = gateway.text().count("Traceback") + (code != 0)
    bad = len(failures) + len(too_much) + faults
    return {
        "name": "soak-api",
        "value": bad,
        "unit": "answers outside the document, faults in the log, and counts that grew",
        "goal": 0,
        "holds": bad == 0,
        "details": {
            "calls": num_cases,
            "rounds": arguments.rounds,
            "failures": failures[:20],
            "faults": faults,
            "too_much": too_much,
            "grown": grown,
            "bounds": MAX_GROWTH,
            "usage": {"after_the_first_round": early.as_dict(), "at_the_end": late.as_dict()},
            "database": url.split(":")[0],
        },
    }


def main() -> int:
    """Run the soak; returns the exit code."""
    found = parser(str(__doc__).splitlines()[0], tasks=0, turns=0, replicas=1, database="sqlite")
    found.add_argument("--rounds", type=int, default=4, help="runs of schemathesis, at least 2; default: 4")
    found.add_argument("--examples", type=int, default=30, help="random bodies of each call in a round; default: 30")
    return run(soak, found.parse_args())


if __name__ == "__main__":
    sys.exit(main())
