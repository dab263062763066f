"""The command `tide-gateway doctor`: what an operator should know before and while a gateway runs."""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_gateway.doctor.findings import Finding


def add_doctor_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `doctor` to the command line; it takes the words of `serve` on top."""
    doctor = commands.add_parser(
        "doctor", help="look at everything that a gateway needs, and change nothing; takes the words of serve"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return doctor


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run `doctor`: 0 where nothing fails, warnings allowed, else 1."""
    from tide_gateway.doctor.examine import run_examination
    from tide_gateway.doctor.findings import Level
    from tide_gateway.serve_options import options_of

    # What is wrong is in the findings; libraries' warnings beside them help nobody.
    logging.disable(logging.CRITICAL)
    try:
        found = run_examination(arguments.config, options_of(arguments))
    finally:
        logging.disable(logging.NOTSET)
    failed = any(finding.level is Level.FAIL for finding in found)
    if arguments.json:
        lines = [{"check": f.check, "level": f.level.value, "says": f.says, "fix": f.fix} for f in found]
        print(json.dumps({"ok": not failed, "findings": lines}, indent=2))
    else:
        _print(found)
    return int(failed)


def _print(found: list[Finding]) -> None:
    width = max(len(finding.check) for finding in found)
    for finding in found:
        print(f"{finding.level.value:<4}  {finding.check:<{width}}  {finding.says}")
        if finding.fix:
            print(f"{'':<4}  {'':<{width}}  -> {finding.fix}")
    counts = Counter(finding.level.value for finding in found)
    print(", ".join(f"{counts[level]} {level}" for level in ("ok", "warn", "fail")))
