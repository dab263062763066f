"""Clusters of real gateways over processes or containers, for tests of faults that leave something behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_cluster import GatewayCluster, scripted

SUPPORT = Path(__file__).parent
RUNTIMES = ["process", pytest.param("docker", marks=pytest.mark.docker)]
"""Parameters of a test that runs on both."""
BOUND_S = 40.0


def table(runtime: str, command: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """An environment's table; the command is run by Python, `-c CODE` or `-m MODULE ...`, with this folder importable.

    Args:
        runtime: process or docker.
        command: Python's arguments; empty takes the scripted environment.
        options: as `gateway_cluster.scripted` takes them.
    """
    if runtime == "process":
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SUPPORT)])
        mine: dict[str, Any] = {"env": {"PYTHONPATH": path}}
        if command:
            mine["command"] = [sys.executable, *command]
        return scripted("process", **mine | options)
    from docker_engine import docker_spec  # here: it needs the docker library

    spec = docker_spec().model_dump(mode="json", exclude_defaults=True)
    spec["docker"]["mounts"] = [*spec["docker"]["mounts"], f"{SUPPORT}:/tide/support"]
    spec["env"]["PYTHONPATH"] += ":/tide/support"
    del spec["name"], spec["runtime"]
    mine = {"command": ["python3", *command]} if command else {}
    return scripted("docker", **spec | mine | options)


def cluster_of(runtime: str, folder: Path, options: dict[str, Any], **more: Any) -> GatewayCluster:
    """A cluster of one replica on SQLite, not started, whose one environment has this table.

    Args:
        runtime: process or docker.
        folder: for its files.
        options: the table.
        more: further arguments of the cluster.
    """
    if runtime == "docker":
        from docker_engine import shared_engine

        more["docker_host"] = shared_engine().url
    url = more.pop("database_url", f"sqlite:///{folder / 'gateway.db'}")
    return GatewayCluster(folder, url, {"scripted": options}, **more)


def wait_until(condition: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> None:
    """Return once the condition holds.

    Raises:
        AssertionError: it does not within the bound.
    """
    deadline_s = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {bound_s:g} s until {what}"
        time.sleep(0.05)
