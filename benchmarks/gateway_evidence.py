"""What bench_gateway reads in the databases: a turn that was answered has its intent and its result there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway_load import Client
from gateway_plan import Plan
from gateway_sides import Side
from sqlalchemy import Connection, create_engine, text

KILL_TASKS = 32
KILL_AFTER_S = 1.0


def rows_account(side: Side) -> dict[str, Any]:
    """A gateway that rests: as many intents and results as it has answered turns."""
    with _connected(side) as connection:
        intents, results = connection.execute(text("SELECT count(*), count(answer) FROM turns")).one()
    return {
        "answered": side.all_turns,
        "intents": intents,
        "results": results,
        "holds": side.all_turns == intents == results,
    }


def killed_account(client: Client, side: Side) -> dict[str, Any]:
    """Kill the gateway with SIGKILL under load: every turn that was answered has its result, none is missing."""
    assert side.cluster is not None
    cluster = side.cluster

    def kill() -> None:
        time.sleep(KILL_AFTER_S)
        cluster.kill()

    answered = client.play(Plan(side.url, f"{side.name}/killed", tasks=KILL_TASKS, until_cut=True), kill).answered
    with _connected(side) as connection:
        query = text("SELECT task_id, count(*), count(answer) FROM turns GROUP BY task_id")
        stored = {row[0]: (row[1], row[2]) for row in connection.execute(query)}
    lost = sum(max(0, turns - stored.get(task_id, (0, 0))[1]) for task_id, turns in answered.items())
    return {"answered": sum(answered.values()), "lost": lost, "holds": lost == 0 and sum(answered.values()) > 0}


@contextmanager
def _connected(side: Side) -> Iterator[Connection]:
    assert side.cluster is not None
    url = side.cluster.database_url.partition("?synchronous")[0]
    engine = create_engine(url, connect_args={} if url.startswith("sqlite") else {"connect_timeout": 10})
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()
