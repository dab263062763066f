"""One run of schemathesis over all that a gateway's `/openapi.json` says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN = "fuzz-0123456789abcdef"
TOKENS = f"olga/operator:{TOKEN}"
# "An integer" may be 1.0 in JSON Schema, and a task that was just started may have ended: both are refused rightly.
LEFT_OUT = "positive_data_acceptance"


@dataclass(frozen=True)
class FuzzRun:
    """What schemathesis found.

    Attributes:
        num_cases: calls that it made.
        tested: operations, each of them at least once.
        failures: in its own words.
        phases: name -> how it ended.
        words: its whole output.
    """

    num_cases: int
    tested: int
    failures: list[dict[str, Any]]
    phases: dict[str, str]
    words: str


def fuzz(url: str, folder: Path, options: Sequence[str], *, limit_s: float) -> FuzzRun:
    """Run schemathesis with every check but one; it goes on after failures.

    Args:
        url: of the gateway.
        folder: for the report.
        options: of `schemathesis run`, for example how many examples, and a seed.
        limit_s: seconds after which it is killed.
    """
    report = folder / "report.json"
    argv = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    argv += ["--header", f"Authorization: Bearer {TOKEN}", "--exclude-checks", LEFT_OUT, "--request-timeout", "20"]
    argv += [
        "--continue-on-failure",
        "--no-shrink",
        "--no-color",
        "--report",
        "json",
        "--report-json-path",
        str(report),
    ]
    done = subprocess.run([*argv, *options], cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    words = done.stdout + done.stderr
    assert report.exists(), words
    found = json.loads(report.read_text())
    # `Finished` is not enough: a server that went away ends a run as well.
    assert found["complete"], words
    assert not found["errors"], words
    phases = {name: phase["status"] for name, phase in found["phases"].items()}
    num_cases = found["test_cases"]["generated"]
    return FuzzRun(num_cases, found["operations"]["tested"], found["failures"], phases, words)
