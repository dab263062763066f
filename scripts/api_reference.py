"""Writes docs/api/tide_sdk.md, the reference of what `tide_sdk` exports, from signatures and docstrings.

python scripts/api_reference.py            print it
python scripts/api_reference.py --write    rewrite docs/api/tide_sdk.md
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator

from api_snapshot import PACKAGE, ROOT, Function, exports, is_public, members, parse, signature

TARGET = ROOT / "docs" / "api" / "tide_sdk.md"
HEAD = """# Reference of `tide_sdk`

Everything that `tide_sdk` exports: `from tide_sdk import agent`. A name that is not here is not public and may change.
[sdk.md](../sdk.md) tells how the parts work together, and two guides begin from nothing: [an environment in ten
minutes](../ten-minutes-environment.md) and [an agent in ten minutes](../ten-minutes-agent.md).

This page is written by `make api-reference` from the docstrings.
"""
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_ITEM = re.compile(r"(\*{0,2}[\w.]+): (.*)", re.DOTALL)


def page() -> str:
    """The whole page: the exports by module, in source order inside."""
    wanted = exports()
    parts = [HEAD]
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found = [node for node in parse(module).body if wanted.get(_name(node)) == module]
        if found:
            parts.append(f"## tide_sdk.{module}\n")
            parts += [part for node in found for part in _entry(node)]
    return "\n".join(parts)


def _name(node: ast.stmt) -> str:
    return node.name if isinstance(node, ast.ClassDef | Function) else ""


def _entry(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Function):
        yield f"### {node.name}\n"
        yield _signature(signature(node))
        yield _words(node)
    elif isinstance(node, ast.ClassDef):
        yield f"### {node.name}\n"
        head = f"class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
        yield _signature("\n".join([head, *(f"    {line}" for line in members(node))]))
        yield _words(node)
        for member in node.body:
            if isinstance(member, Function) and is_public(member.name) and ast.get_docstring(member):
                yield f"#### {node.name}.{member.name}\n"
                yield _words(member)


def _signature(text: str) -> str:
    lines = [_wrapped(line) for line in text.splitlines()]
    return "\n".join(["```text", *lines, "```\n"])


def _wrapped(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line, 110, subsequent_indent=indent + "        ", break_long_words=False, break_on_hyphens=False
    )


def _words(node: ast.ClassDef | Function) -> str:
    """The docstring as Markdown: its sections become lists, indented text stays as it is."""
    lines: list[str] = []
    blocks = re.split(r"\n\n", inspect.cleandoc(ast.get_docstring(node, clean=False) or ""))
    for block in blocks:
        title, colon, rest = block.partition(":\n")
        if colon and title in SECTIONS:
            lines += [f"*{title}*\n", *_items(rest), ""]
        else:
            lines += [block, ""]
    return "\n".join(lines)


def _items(text: str) -> Iterator[str]:
    """One bullet for each entry; a line that is indented deeper goes on with the entry before it."""
    entries: list[str] = []
    for line in inspect.cleandoc("\n" + text).splitlines():
        if entries and line.startswith(" "):
            entries[-1] += " " + line.strip()
        else:
            entries.append(line.strip())
    for entry in entries:
        match = _ITEM.match(entry)
        yield f"- `{match[1]}`: {match[2]}" if match else f"- {entry}"


def main() -> None:
    """Prints or writes the page."""
    text = page()
    if sys.argv[1:] == ["--write"]:
        TARGET.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
