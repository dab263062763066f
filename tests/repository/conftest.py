"""What the repository checks share: the tree as git sees it."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {
    "gateway": "tide_gateway",
    "sdk": "tide_sdk",
    "trainer": "tide_trainer",
    "environments": "tide_environments",
}


@cache
def _listed() -> tuple[Path, ...]:
    # Tracked files and new ones that are not ignored: a check must not wait for the commit.
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout.split("\0")
    return tuple(path for name in sorted(set(names)) if name and (path := ROOT / name).is_file())


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


class Tree:
    """The repository's files, with paths told relative to its root."""

    root = ROOT
    source_roots = SOURCE_ROOTS
    files = property(lambda self: _listed())

    def name(self, path: Path) -> str:
        return path.relative_to(ROOT).as_posix()

    def under(self, *folders: str, suffix: str = ".py") -> list[Path]:
        """Files with the suffix below any of the top-level folders; none named means everywhere."""
        return [p for p in _listed() if p.suffix == suffix and (not folders or p.relative_to(ROOT).parts[0] in folders)]

    def parse(self, path: Path) -> ast.Module:
        return _parsed(path)


@pytest.fixture(scope="session")
def tree() -> Tree:
    return Tree()
