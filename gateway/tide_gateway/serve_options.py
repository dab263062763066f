"""What `tide-gateway serve` is told, and what it may not be told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tide_gateway.settings import SettingsError

DRAIN_S = 3.0
MAX_DRAIN_S = 3600.0
MIN_RETENTION_DAYS, MAX_RETENTION_DAYS = 0.01, 36_500.0
MIN_OUTLIVE_S = 0.1


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `tide-gateway serve` was told.

    Attributes:
        port: 0 takes a free one.
        data: folder of logs and blobs, one for all replicas; None takes one beside a SQLite file.
        outlive_s: seconds that `process` servers outlive a killed gateway.
        keep: a stop leaves tasks and servers to the next gateway.
        drain_s: seconds that a stop gives to turns, starts and ends in flight.
        retention_days: days that tasks are kept once they are over, 0 for ever.
        announce: file that gets `{"url", "pid"}` once requests are answered.
        tls_cert, tls_key: PEM files, both or none: then only https is spoken.
    """

    host: str
    port: int
    database: str
    announce: Path | None
    log_level: str
    data: Path | None = None
    outlive_s: float = 120.0
    keep: bool = False
    drain_s: float = DRAIN_S
    retention_days: float = 7.0
    tls_cert: Path | None = None
    tls_key: Path | None = None


def options_of(arguments: argparse.Namespace) -> ServeOptions:
    """The options of a command line."""
    return ServeOptions(
        host=arguments.host,
        port=arguments.port,
        database=arguments.database,
        announce=arguments.announce,
        log_level=arguments.log_level,
        data=arguments.data,
        outlive_s=arguments.outlive_s,
        keep=arguments.keep,
        drain_s=arguments.drain_s,
        retention_days=arguments.retention_days,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
    )


def check_options(options: ServeOptions) -> None:
    """Refuse numbers that make no sense, NaN among them, and a folder to announce in.

    Raises:
        SettingsError: naming the option and the fix.
    """
    if options.announce is not None and options.announce.is_dir():
        raise SettingsError(f"--announce {options.announce}: is a folder; name a file in it")
    # Supervisors look every fifth of it.
    if options.outlive_s != 0 and not options.outlive_s >= MIN_OUTLIVE_S:
        words = f"must be 0, or {MIN_OUTLIVE_S:g} or more seconds"
        raise SettingsError(f"--outlive-s {options.outlive_s:g}: {words}")
    if not 0 <= options.drain_s <= MAX_DRAIN_S:
        raise SettingsError(f"--drain-s {options.drain_s:g}: must be 0 to {MAX_DRAIN_S:g} seconds")
    if not (options.retention_days == 0 or MIN_RETENTION_DAYS <= options.retention_days <= MAX_RETENTION_DAYS):
        words = f"must be {MIN_RETENTION_DAYS:g} to {MAX_RETENTION_DAYS:g}, or 0 to keep tasks for ever"
        raise SettingsError(f"--retention-days {options.retention_days:g}: {words}")
