"""The documents hold: links lead somewhere, and every make target that they name exists."""

from __future__ import annotations

import re
from urllib.parse import unquote

import pytest

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"\bmake ([a-z]+(?:-[a-zA-Z]+)*)")
# Where a command is meant: in a fenced block, in code, at the start of a line.
CODE = re.compile(r"`([^`\n]+)`")


def headings(text: str) -> set[str]:
    """The anchors that a forge makes of a document's headings."""
    lines = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower().replace("`", "")).replace(" ", "-") for line in lines}


def test_relative_links_resolve(tree):
    broken = []
    for path in tree.under(suffix=".md"):
        for target in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = unquote(target).partition("#")
            aim = (path.parent / file).resolve() if file else path
            whole = aim.exists() and (not anchor or anchor in headings(aim.read_text(encoding="utf-8")))
            if not whole:
                broken.append(f"{tree.name(path)}: {target}")
    assert broken == []


def test_paths_in_code_of_the_maps_exist(tree):
    """The paper map and the architecture name modules and tests; what is renamed must be renamed there too."""
    path_in_code = re.compile(
        r"`((?:gateway|sdk|trainer|environments|tests|docs|examples|scripts|benchmarks|docker)/[\w./-]+)`"
    )
    missing = []
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/paper-map.md", "docs/testing.md"):
        text = (tree.root / name).read_text(encoding="utf-8")
        missing += [f"{name}: {aim}" for aim in path_in_code.findall(text) if not (tree.root / aim).exists()]
    assert missing == []


@pytest.fixture(scope="module")
def targets(tree) -> set[str]:
    makefile = (tree.root / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    scripts = [p.stem for kind in ("bench", "soak") for p in (tree.root / "benchmarks").glob(f"{kind}_*.py")]
    return named | {"bench-NAME", "soak-NAME"} | {name.replace("_", "-") for name in scripts}


def test_make_targets_named_in_the_documents_exist(tree, targets):
    unknown = []
    for path in tree.under(suffix=".md"):
        text = path.read_text(encoding="utf-8")
        code = "\n".join([match.group(0) for match in FENCE.finditer(text)] + CODE.findall(text))
        unknown += [f"{tree.name(path)}: make {name}" for name in MAKE.findall(code) if name not in targets]
    assert unknown == []
