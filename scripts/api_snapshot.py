"""Prints the public names and signatures of tide_sdk, read from its source; `--write` records them in docs/api.

Public are the names that `tide_sdk` itself exports, and all of the modules in WHOLE_MODULES without a leading
underscore.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sdk" / "tide_sdk"
RECORD = ROOT / "docs" / "api" / "tide_sdk.txt"
# The contract's own modules. The rest of the package is public only where tide_sdk/__init__.py exports it.
WHOLE_MODULES = ("clocks", "errors", "wire")
MAX_VALUE_CHARS = 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


def render() -> str:
    """The whole snapshot, one name a line, by module and in source order inside."""
    exported = exports()
    lines = ["tide_sdk exports", *(f"    {name}" for name in sorted(exported)), ""]
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        wanted = None if module in WHOLE_MODULES else {name for name, home in exported.items() if home == module}
        names = [line for node in parse(module).body for line in _told(node, wanted)] if module != "__init__" else []
        if names:
            lines += [f"tide_sdk.{module}", *(f"    {name}" for name in names), ""]
    return "\n".join(lines)


def parse(module: str) -> ast.Module:
    """The syntax tree of a module of the package."""
    return ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))


def exports() -> dict[str, str]:
    """What `tide_sdk` exports: name -> module."""
    for node in parse("__init__").body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "_MODULES" for t in node.targets):
            return {name: module for module, names in ast.literal_eval(node.value).items() for name in names}
    return {}


def _told(node: ast.stmt, wanted: set[str] | None) -> Iterator[str]:
    """The lines of one top-level statement, where its name is public and wanted (None: all)."""
    if isinstance(node, ast.ClassDef | Function):
        if not is_public(node.name) or (wanted is not None and node.name not in wanted):
            return
        if isinstance(node, Function):
            yield signature(node)
            return
        yield f"class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
        yield from (f"    {member}" for member in members(node))
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        yield from (told for name, told in _constants(node) if wanted is None or name in wanted)


def members(cls: ast.ClassDef) -> Iterator[str]:
    """The lines of a class's public members."""
    for node in cls.body:
        if isinstance(node, Function) and (is_public(node.name) or node.name == "__init__"):
            yield signature(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (told for _, told in _constants(node))


def _constants(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[str, str]]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if isinstance(target, ast.Name) and is_public(target.id):
            kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
            default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
            default = default if len(default) <= MAX_VALUE_CHARS else " = ..."
            yield target.id, f"{target.id}{kind}{default}"


def signature(node: Function) -> str:
    """A function's head in one line."""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    decorators = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{decorators}{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def is_public(name: str) -> bool:
    """True without a leading underscore."""
    return not name.startswith("_")


def main() -> None:
    """Prints or writes the snapshot."""
    if sys.argv[1:] == ["--write"]:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())


if __name__ == "__main__":
    main()
