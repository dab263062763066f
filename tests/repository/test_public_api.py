"""The SDK's public names and signatures change on purpose only."""

from __future__ import annotations

import subprocess
import sys


def told(tree, name: str) -> str:
    script = tree.root / "scripts" / name
    return subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=60).stdout


def test_public_names_of_the_sdk_match_the_snapshot(tree):
    present = told(tree, "api_snapshot.py")
    recorded = (tree.root / "docs" / "api" / "tide_sdk.txt").read_text(encoding="utf-8")
    hint = "a public name changed: run `make api-snapshot`, read its diff, add a line to CHANGELOG.md"
    assert present.splitlines() == recorded.splitlines(), hint


def test_the_reference_says_what_the_docstrings_say(tree):
    recorded = (tree.root / "docs" / "api" / "tide_sdk.md").read_text(encoding="utf-8")
    hint = "a docstring of the SDK changed: run `make api-reference`"
    assert told(tree, "api_reference.py").splitlines() == recorded.splitlines(), hint
