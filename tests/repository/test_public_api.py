"""The SDK's public names and signatures change on purpose only."""

from __future__ import annotations

import subprocess
import sys


def test_public_names_of_the_sdk_match_the_snapshot(tree):
    script = tree.root / "scripts" / "api_snapshot.py"
    present = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=60).stdout
    recorded = (tree.root / "docs" / "api" / "tide_sdk.txt").read_text(encoding="utf-8")
    hint = "a public name changed: run `make api-snapshot`, read its diff, add a line to CHANGELOG.md"
    assert present.splitlines() == recorded.splitlines(), hint
