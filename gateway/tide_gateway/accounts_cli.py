"""The commands `tide-gateway keys` and `tide-gateway owners`; they work beside a running gateway and without one."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tide_gateway.roles import ROLES

if TYPE_CHECKING:
    from tide_gateway.keys import KeyStore

T = TypeVar("T")


def add_account_parsers(commands: Any, default_database: str) -> None:
    """Add `keys` and `owners` to the command line."""
    keys = commands.add_parser("keys", help="make, list and revoke API keys").add_subparsers(
        dest="action", required=True
    )
    create = keys.add_parser("create", help="make a key and print it, once, as the only line on stdout")
    create.add_argument("--owner", required=True, help="whose tasks the key is for")
    create.add_argument("--role", choices=ROLES, default="agent", help="default: agent")
    create.add_argument("--label", default="", help="words for people")
    create.add_argument("--expires-days", type=float, help="days until it expires; default: never")
    listing = keys.add_parser("list", help="all keys without their secrets, the newest first")
    revoke = keys.add_parser("revoke", help="make a key invalid for ever, within seconds")
    revoke.add_argument("key_id", help="the 8 characters after tide_")
    owners = commands.add_parser("owners", help="list and set the limits of owners")
    owners = owners.add_subparsers(dest="action", required=True)
    limits = owners.add_parser("list", help="the owners that have a limit")
    limit = owners.add_parser("set", help="set how many tasks an owner may have at once")
    limit.add_argument("owner")
    limit.add_argument("--max-tasks", type=int, required=True, help="over all environments; 0 for any number")
    for parser in (create, listing, revoke, limits, limit):
        parser.add_argument("--database", default=default_database, help=f"default: {default_database}")


def run_keys(arguments: argparse.Namespace) -> int:
    """Run `keys create|list|revoke`."""
    if arguments.action == "create":
        days: float | None = arguments.expires_days
        lifetime_s = None if days is None else days * 86400.0
        text, key = _with_store(
            arguments.database,
            lambda store: store.create(arguments.owner, arguments.role, label=arguments.label, lifetime_s=lifetime_s),
        )
        print(text)
        print(f"tide-gateway: key {key.key_id} of {key.owner}, role {key.role}; it is not shown again", file=sys.stderr)
        return 0
    if arguments.action == "revoke":
        revoked = _with_store(arguments.database, lambda store: store.revoke(arguments.key_id))
        if revoked is None:
            print("tide-gateway: there is no such key; give the 8 characters after tide_", file=sys.stderr)
            return 2
        print(f"revoked {revoked.key_id} of {revoked.owner}")
        return 0
    rows = [("KEY_ID", "OWNER", "ROLE", "STATE", "CREATED", "EXPIRES", "LABEL")]
    now_s = time.time()
    for key in _with_store(arguments.database, lambda store: store.keys()):
        state = "revoked" if key.revoked_s else "expired" if 0 < key.expires_s <= now_s else "valid"
        rows.append((key.key_id, key.owner, key.role, state, _day(key.created_s), _day(key.expires_s), key.label))
    _print_table(rows)
    return 0


def run_owners(arguments: argparse.Namespace) -> int:
    """Run `owners list|set`."""
    if arguments.action == "set":
        limit = _with_store(arguments.database, lambda store: store.set_owner(arguments.owner, arguments.max_tasks))
        print(f"{limit.owner}: {limit.max_tasks or 'any number of'} tasks at once")
        return 0
    limits = _with_store(arguments.database, lambda store: store.owners())
    _print_table([("OWNER", "MAX_TASKS"), *((limit.owner, str(limit.max_tasks)) for limit in limits)])
    return 0


def _with_store(text: str, call: Callable[[KeyStore], Awaitable[T]]) -> T:
    from tide_gateway.database import Database, database_url
    from tide_gateway.keys import KeyStore
    from tide_gateway.private import make_private_file
    from tide_sdk.migrations import migrate

    url = database_url(text)
    if url.get_backend_name() == "sqlite":
        # As `serve` does: an embedded file is made and migrated by whoever comes first.
        make_private_file(Path(str(url.database)))
        migrate("gateway", url)

    async def run() -> T:
        database = Database(url)
        try:
            return await call(KeyStore(database))
        finally:
            await database.close()

    return asyncio.run(run())


def _day(moment_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(moment_s)) if moment_s else "never"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
