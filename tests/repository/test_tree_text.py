"""What no file of the tree may say, and how optional dependencies are looked for."""

from __future__ import annotations

import ast
import re

import pytest

# Written with character classes so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(^|[^A-Za-z0-9_.])/(wor[k]|far[m]|hom[e]/[a-z]+|roo[t])/"),
    "a registry's host": re.compile(r"//[a-z.]*(pyp[i]|npmj[s]|pythonhoste[d])|//de[b]\."),
    "an emoji": re.compile("[\U0001f300-\U0001faff\u2600-\u26ff\u2705\u274c\u2728]"),
}
BINARY = {".png", ".gif", ".jpg", ".ico", ".gz", ".safetensors"}

# Optional distribution -> the packages that may import it. Elsewhere it is probed with importlib.metadata.
OPTIONAL = {
    "docker": ("gateway/tide_gateway/runtimes",),
    "ray": ("gateway/tide_gateway/runtimes", "trainer/tide_trainer/cluster"),
    "vllm": ("trainer/tide_trainer/backends",),
    "megatron": ("trainer/tide_trainer/backends",),
    "playwright": ("environments/tide_environments",),
}


def test_no_file_names_a_machine_a_registry_or_an_emoji(tree):
    found = []
    for path in tree.files:
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [f"{tree.name(path)}:{number} {what}" for what in _forbidden_in(line, tree.name(path))]
    assert found == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("see /wor" + "k/main/x.py", "a path of one machine"),
        ("cache = '/hom" + "e/ann/cache'", "a path of one machine"),
        ("index: https://pyp" + "i.org/simple", "a registry's host"),
        ("done \U0001f389", "an emoji"),
    ],
)
def test_what_is_forbidden_is_found(line, what):
    assert _forbidden_in(line, "docs/x.md") == [what]


def test_optional_dependencies_are_not_probed_by_import(tree):
    """An empty folder of the same name imports without an error, so `try: import docker` proves nothing."""
    found = []
    for path in tree.under(*tree.source_roots):
        for node in ast.walk(tree.parse(path)):
            if isinstance(node, ast.Try) and _catches_import_error(node):
                found += [f"{tree.name(path)}:{node.lineno} {name}" for name in _imports(node.body) if name in OPTIONAL]
    assert found == [], "ask importlib.metadata.version(...) instead"


def test_optional_dependencies_are_imported_only_where_they_belong(tree):
    found = []
    for path in tree.under(*tree.source_roots):
        for name in _imports(ast.walk(tree.parse(path))):
            if not tree.name(path).startswith(OPTIONAL.get(name, ("",))):
                found.append(f"{tree.name(path)} imports {name}")
    assert found == []


def _forbidden_in(line: str, name: str) -> list[str]:
    found = [what for what, pattern in FORBIDDEN.items() if pattern.search(line)]
    # A test may feed an emoji to a tokenizer or a codec.
    return [what for what in found if not (what == "an emoji" and name.startswith("tests/"))]


def _catches_import_error(node: ast.Try) -> bool:
    caught = {
        name.id
        for handler in node.handlers
        if handler.type
        for name in ast.walk(handler.type)
        if isinstance(name, ast.Name)
    }
    return bool(caught & {"ImportError", "ModuleNotFoundError", "Exception"})


def _imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
