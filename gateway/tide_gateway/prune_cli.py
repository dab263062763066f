"""The command `tide-gateway prune`: what a running gateway does by itself (`--retention-days`), once and by hand."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

MAX_DAYS = 36_500.0


def add_prune_parser(commands: Any, default_database: str) -> None:
    """Add `prune` to the command line."""
    prune = commands.add_parser("prune", help="remove tasks that are over, with their bodies, and old logs; once")
    prune.add_argument("--older-than", type=float, required=True, metavar="DAYS", help="days since they were over")
    prune.add_argument("--database", default=default_database, help=f"default: {default_database}")
    prune.add_argument("--data", type=Path, help="folder of logs and blobs; default: beside a SQLite file")


def run_prune(arguments: argparse.Namespace) -> int:
    """Run `prune`, beside a running gateway or without one."""
    from tide_gateway.database import DatabaseError, database_url
    from tide_gateway.private import data_folder
    from tide_gateway.settings import SettingsError
    from tide_sdk.migrations import check_revision

    days: float = arguments.older_than
    if not 0 <= days <= MAX_DAYS:
        raise SettingsError(f"--older-than {days:g}: must be 0 to {MAX_DAYS:g} days")
    url = database_url(arguments.database)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
        raise DatabaseError(f"--database {url}: there is no such file")
    if not check_revision("gateway", url):
        raise DatabaseError(f"--database {url}: holds no gateway's tables")
    removed = asyncio.run(_prune(url, data_folder(arguments.data, url), days))
    print("removed {} tasks, {} large bodies, {} logs".format(*removed))
    return 0


async def _prune(url: Any, data: Path, days: float) -> tuple[int, int, int]:
    from tide_gateway.blobs import BlobStore
    from tide_gateway.database import Database
    from tide_gateway.repository import InstanceRows
    from tide_gateway.repository.retention import RetentionRows
    from tide_gateway.service.retention import DAY_S, Retention
    from tide_gateway.timekeeping import DatabaseTime

    database = Database(url)
    try:
        clock = DatabaseTime()
        await clock.sync(database)
        rows, instances = RetentionRows(database), InstanceRows(database)
        retention = Retention(rows, instances, BlobStore(data / "blobs"), data / "logs", clock, days * DAY_S)
        num_tasks = await retention.tasks()
        files = await retention.files()
        return num_tasks, files.bodies, files.logs
    finally:
        await database.close()
