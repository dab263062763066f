"""The command `tide-gateway`, and its subcommands. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tide_gateway.accounts_cli import add_account_parsers, run_keys, run_owners
from tide_gateway.doctor_cli import add_doctor_parser, run_doctor
from tide_gateway.prune_cli import add_prune_parser, run_prune

DEFAULT_DATABASE = "sqlite:///tide-gateway.db"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tide-gateway", description="Hosts environments for agents.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve tasks; migrates the database by itself")
    doctor = add_doctor_parser(commands)
    for command in (serve, doctor):
        _add_serve_words(command)
    migrate = commands.add_parser("migrate", help="bring the database to this version's tables")
    migrate.add_argument("--database", default=DEFAULT_DATABASE, help=f"default: {DEFAULT_DATABASE}")
    environments = commands.add_parser("environments", help="check environments.toml and print what it registers")
    environments.add_argument("--config", type=Path, default=Path("environments.toml"))
    add_prune_parser(commands, DEFAULT_DATABASE)
    add_account_parsers(commands, DEFAULT_DATABASE)
    return parser


def _add_serve_words(parser: argparse.ArgumentParser) -> None:
    """What `serve` is told; the doctor gets the same words."""
    parser.add_argument("--config", type=Path, default=Path("environments.toml"), help="default: environments.toml")
    parser.add_argument("--host", default="127.0.0.1", help="other than loopback needs keys or tokens")
    parser.add_argument("--port", type=int, default=8800, help="0 takes a free one; default: 8800")
    parser.add_argument("--database", default=DEFAULT_DATABASE, help=f"default: {DEFAULT_DATABASE}")
    parser.add_argument("--data", type=Path, help="folder of logs and blobs; default: beside a SQLite file")
    parser.add_argument(
        "--outlive-s", type=float, default=120.0, help="seconds that server processes outlive a killed gateway"
    )
    parser.add_argument("--keep", action="store_true", help="a stop leaves tasks and servers to the next gateway")
    parser.add_argument("--drain-s", type=float, default=3.0, help="seconds that a stop gives to what is in flight")
    parser.add_argument(
        "--retention-days", type=float, default=7.0, help="days that tasks are kept once they are over; 0: for ever"
    )
    parser.add_argument("--announce", type=Path, help='file that gets {"url", "pid"} when requests are answered')
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate chain in PEM; then only https is spoken"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key in PEM, without a passphrase")
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", choices=levels, default="info")
    parser.add_argument("--log-format", choices=["text", "json"], default="text", help="json: one object a line")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 2 means that the configuration or the command line is wrong."""
    arguments = make_parser().parse_args(argv)
    from sqlalchemy.exc import DatabaseError as SQLError

    from tide_gateway.database import DatabaseError, StorageFailed
    from tide_gateway.keys import KeyRefused
    from tide_gateway.settings import SettingsError
    from tide_sdk.migrations import DatabaseTooNew

    commands = {
        "serve": _serve,
        "migrate": _migrate,
        "environments": _environments,
        "doctor": run_doctor,
        "prune": run_prune,
        "keys": run_keys,
        "owners": run_owners,
    }
    try:
        return commands[arguments.command](arguments)
    except (SettingsError, DatabaseError, KeyRefused) as error:
        print(f"tide-gateway: {error}", file=sys.stderr)
    except (DatabaseTooNew, StorageFailed) as error:
        print(f"tide-gateway: database: {error}", file=sys.stderr)
    except SQLError as error:
        print(f"tide-gateway: database: {error.orig}; check --database", file=sys.stderr)
    return 2


def _serve(arguments: argparse.Namespace) -> int:
    import asyncio
    import signal

    from tide_gateway.log_lines import set_up_logging
    from tide_gateway.serve import serve
    from tide_gateway.serve_options import options_of
    from tide_gateway.settings import load_settings

    settings = load_settings(arguments.config)
    set_up_logging(arguments.log_level, arguments.log_format)
    options = options_of(arguments)
    try:
        import uvloop
    except ImportError:
        uvloop = None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        runner.run(serve(settings, options))
        # All is stopped: a signal that comes between here and the exit must not make it look like a failure.
        for number in (signal.SIGINT, signal.SIGTERM):
            runner.get_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    return 0


def _migrate(arguments: argparse.Namespace) -> int:
    from tide_gateway.database import database_url
    from tide_gateway.private import make_private_file
    from tide_sdk.migrations import migrate

    url = database_url(arguments.database)
    if url.get_backend_name() == "sqlite":
        make_private_file(Path(str(url.database)))
    print(f"{url}: at revision {', '.join(migrate('gateway', url))}")
    return 0


def _environments(arguments: argparse.Namespace) -> int:
    from tide_gateway.settings import load_settings

    specs = load_settings(arguments.config).environments
    rows = [("NAME", "RUNTIME", "CAPACITY", "SERVERS", "LIMITS (s)", "COMMAND")]
    for spec in specs.values():
        limits = " ".join(f"{name.value}={seconds:g}" for name, seconds in spec.all_limits.items())
        rows.append((spec.name, spec.runtime, str(spec.capacity), str(spec.servers), limits, " ".join(spec.command)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
