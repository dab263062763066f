"""All checks of one examination, in two rounds: the second needs what the rows say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy.engine import URL

from tide_gateway.database import DatabaseError, database_url
from tide_gateway.doctor import database, host, storage
from tide_gateway.doctor.environments import checks_of
from tide_gateway.doctor.findings import Check, Finding, ok, refused, run_checks, warn
from tide_gateway.private import data_path
from tide_gateway.runtimes.docker_sdk import in_thread
from tide_gateway.serve_options import ServeOptions, check_options
from tide_gateway.settings import GatewaySettings, SettingsError, check_bind, load_settings

THREAD_S = 15.0
DATABASE_S = 20.0


async def examine(config: Path, asked: ServeOptions) -> list[Finding]:
    """Look at everything; changes nothing. Takes as long as the slowest check may, at most.

    Args:
        config: the registered environments.
        asked: what `serve` is told.
    """
    settings, found = _configuration(config)
    url, wrong = _url(asked)
    found += _options(asked) + wrong
    facts = database.Facts()
    pid = 0

    async def rows(url: URL) -> Sequence[Finding]:
        nonlocal facts
        names = None if settings is None else settings.environments.keys()
        facts = await in_thread(lambda: database.look(url, names), DATABASE_S)
        return facts.findings

    async def lock(url: URL) -> Sequence[Finding]:
        nonlocal pid
        findings, pid = await in_thread(lambda: storage.look_at_lock(url), THREAD_S)
        return findings

    specs = [] if settings is None else list(settings.environments.values())
    uses = {spec.runtime for spec in specs} & host.EXTRAS.keys()
    if url is not None and url.get_backend_name() == "postgresql":
        uses.add("postgresql")
    data = None if url is None else data_path(asked.data, url)
    first = [
        _in_thread("packages", lambda: host.look_at_packages(uses)),
        _in_thread("open files", lambda: host.look_at_file_limit(specs)),
        _in_thread("tls", lambda: host.look_at_tls(asked.tls_cert, asked.tls_key)),
        _in_thread("files", lambda: storage.look_at_files(url, data)),
    ]
    if url is not None:
        first.append(Check("database", lambda: rows(url), DATABASE_S + 1.0))
        if url.get_backend_name() == "sqlite":
            first.append(Check("lock", lambda: lock(url)))
    found += await run_checks(first)

    servers = facts.servers if facts.readable else None
    environ = {} if settings is None else settings.process_environment
    second = [
        _in_thread("sockets", lambda: storage.look_at_sockets(facts.deployment)),
        _in_thread(
            "address",
            lambda: host.look_at_address(
                asked.host, asked.port, tls=asked.tls_cert is not None, pid=pid, replicas=facts.replicas
            ),
            limit_s=30.0,
        ),
        *checks_of(specs, environ, facts.deployment, servers),
    ]
    found += await run_checks(second)
    return found + ([] if settings is None else _keys(asked, settings, facts))


def _configuration(config: Path) -> tuple[GatewaySettings | None, list[Finding]]:
    try:
        settings = load_settings(config)
    except SettingsError as error:
        return None, [refused("configuration", error)]
    names = ", ".join(settings.environments)
    return settings, [ok("configuration", f"{config}: {names}; {len(settings.tokens)} static tokens")]


def _url(asked: ServeOptions) -> tuple[URL | None, list[Finding]]:
    try:
        return database_url(asked.database), []
    except DatabaseError as error:
        return None, [refused("database", error)]


def _options(asked: ServeOptions) -> list[Finding]:
    try:
        check_options(asked)
    except SettingsError as error:
        return [refused("options", error)]
    return []


def _keys(asked: ServeOptions, settings: GatewaySettings, facts: database.Facts) -> list[Finding]:
    if facts.has_keys is None and not settings.tokens:
        return [
            warn("keys", "whether there is a key is not known: the database's rows cannot be read", "see `database`")
        ]
    try:
        check_bind(asked.host, settings, has_keys=bool(facts.has_keys))
    except SettingsError as error:
        return [refused("keys", error)]
    if facts.has_keys or settings.tokens:
        return [ok("keys", "callers need a key or a token")]
    return [ok("keys", "none: everyone on this machine is an operator, and nobody else is let in")]


def _in_thread(name: str, look: Callable[[], Sequence[Finding]], limit_s: float = THREAD_S) -> Check:
    """A check that blocks; a thread that hangs does not keep the process from ending."""

    async def run() -> Sequence[Finding]:
        return await in_thread(look, limit_s)

    return Check(name, run, limit_s + 1.0)


def run_examination(config: Path, asked: ServeOptions) -> list[Finding]:
    """`examine`, in an event loop of its own."""
    return asyncio.run(examine(config, asked))
