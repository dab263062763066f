"""The SDK imports with its base dependencies alone: agents and environment authors install nothing else."""

from __future__ import annotations

import subprocess
import sys

EXTRAS_ONLY = (
    *("alembic", "aiosqlite", "fastapi", "httptools", "jinja2", "minigrid", "numpy", "orjson", "rich", "safetensors"),
    *("sqlalchemy", "starlette", "tokenizers", "torch", "transformers", "uvloop", "vllm"),
)
# Shared by the two services, which have its extras; see its docstring.
NEEDS_AN_EXTRA = ("tide_sdk.migrations",)

PROGRAM = """
import importlib, pkgutil, sys
extras_only, needs_an_extra = sys.argv[1].split(","), sys.argv[2].split(",")
for name in extras_only:
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
import tide_sdk
for module in pkgutil.walk_packages(tide_sdk.__path__, "tide_sdk."):
    if module.name not in needs_an_extra:
        importlib.import_module(module.name)
print("all imported")
"""


def test_the_sdk_imports_without_any_extra():
    command = [sys.executable, "-c", PROGRAM, ",".join(EXTRAS_ONLY), ",".join(NEEDS_AN_EXTRA)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all imported"
