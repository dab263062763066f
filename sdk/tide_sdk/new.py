"""`tide-env new NAME`: the skeleton of an environment, which works."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path
from typing import Any

from tide_sdk.serve import ServeError

FILES = {
    "README.md.txt": "README.md",
    "pyproject.toml.txt": "pyproject.toml",
    "environment.py.txt": "{name}/environment.py",
    "test_environment.py.txt": "tests/test_environment.py",
    "environments.toml.txt": "environments.toml",
    "Dockerfile.txt": "Dockerfile",
    "dockerignore.txt": ".dockerignore",
    "gitignore.txt": ".gitignore",
}
"""File of `templates/` -> where it goes."""
MAX_NAME_CHARS = 64
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TAKEN = {
    *(
        "tests",
        "wheels",
        "dist",
        "dockerfile",
        "tiderl",
        "tide_sdk",
        "tide_gateway",
        "tide_trainer",
        "tide_environments",
    ),
    # what the project itself imports or is made with
    *("httpx", "pydantic", "uvicorn", "pytest", "hatchling"),
    # whose class would take the name of one that the game imports, or no name that a class can have
    *("environment", "message", "start", "step", "none", "true", "false"),
}


def add_parser(subparsers: Any) -> None:
    """Add `new` to the command."""
    words = "write the skeleton of an environment, with a test and a Dockerfile"
    parser: argparse.ArgumentParser = subparsers.add_parser("new", help=words)
    parser.description = (
        "Write a folder with an environment that works (a small game), a test that plays it and checks its server, "
        "pyproject.toml, Dockerfile, environments.toml and README.md. Nothing that exists is written over."
    )
    parser.add_argument("name", metavar="NAME", help="of the package: lower-case words with underscores, my_game")
    parser.add_argument("--path", type=Path, metavar="DIR", help="the new folder (default: NAME, here)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the skeleton.

    Raises:
        ServeError: the name or the folder cannot be taken.
    """
    name: str = arguments.name
    check_name(name)
    folder: Path = arguments.path or Path(name)
    try:
        write(folder, name)
    except OSError as error:
        raise ServeError(f"{folder} cannot be written: {error}") from error
    print(f"{folder}: begin with {name}/environment.py, and run pytest in the folder; README.md has the rest")
    return 0


def check_name(name: str) -> None:
    """Check that a package can be called so.

    Raises:
        ServeError: it cannot; the message says which name could.
    """
    if _NAME.fullmatch(name) is None or len(name) > MAX_NAME_CHARS:
        near = "_".join(re.findall(r"[a-z0-9]+", name.lower()))[:MAX_NAME_CHARS].strip("_")
        hint = f", for example {near}" if _NAME.fullmatch(near) else ", for example my_game"
        raise ServeError(f"{name!r}: give lower-case letters, digits and underscores, a letter first{hint}")
    if keyword.iskeyword(name) or name in _TAKEN or name in sys.stdlib_module_names:
        raise ServeError(f"{name!r}: Python or TideRL has that name already; take another, for example {name}_game")


def write(folder: Path, name: str) -> None:
    """Write the skeleton into a new or empty folder.

    Args:
        folder: made with its parents where it is missing.
        name: of the package.

    Raises:
        ServeError: there is something in the folder.
        OSError: it cannot be written.
    """
    from importlib import metadata, resources  # here: `tide-env serve` shall not wait for them

    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ServeError(f"{folder} is not empty; nothing was written. Give another folder with --path")
    values = {
        "@name@": name,
        "@Class@": "".join(word.capitalize() for word in name.split("_")),
        "@project@": name.replace("_", "-"),
        "@version@": metadata.version("tiderl"),
    }
    templates = resources.files("tide_sdk") / "templates"
    for source, target in FILES.items():
        text = (templates / source).read_text(encoding="utf-8")
        for mark, value in values.items():
            text = text.replace(mark, value)
        _create(folder / target.format(name=name), text)
    _create(folder / name / "__init__.py", f'"""The environment {name}."""\n')


def _create(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
