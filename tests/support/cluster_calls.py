"""A cluster with a client of all its replicas, and the calls that its tests make over and over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gateway_cluster import GatewayCluster
from replica_client import ReplicaClient

GO = {"role": "assistant", "content": "go"}


def turn_of(task_id: str, turn: int) -> dict[str, Any]:
    """The body of a turn."""
    return {"task_id": task_id, "turn": turn, "message": GO}


async def start(client: ReplicaClient, key: str = "k", environment: str = "scripted", **task: Any) -> str:
    """Start a task with these parameters; its id."""
    body = {"environment": environment, "key": key, "task": task}
    return (await client.post("/start", body)).data["task_id"]


@contextlib.asynccontextmanager
async def clustered(
    folder: Path, url: str, tables: dict[str, Any], replicas: int = 1, **options: Any
) -> AsyncIterator[tuple[GatewayCluster, ReplicaClient]]:
    """A running cluster and a client of all its replicas."""
    with GatewayCluster(folder, url, tables, replicas, **options) as cluster:
        await asyncio.to_thread(cluster.start_all)
        async with ReplicaClient(cluster.urls) as client:
            yield cluster, client


def sqlite(folder: Path) -> str:
    """The URL of a database in the folder."""
    return f"sqlite:///{folder / 'gateway.db'}"
