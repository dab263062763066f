"""`tide-env check URL` and `tide-env check -- COMMAND ...`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tide_sdk.serve import ServeError

if TYPE_CHECKING:
    from tide_sdk.check.case import Case, Plan, Result
    from tide_sdk.check.subject import Subject

CAPACITY = 8
"""Tasks that a server which this command starts is asked to hold."""
COMMAND_BOOT_S = 60.0
URL_BOOT_S = 10.0
INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    """Add `check` to the command."""
    words = "check that an environment server, in any language, speaks the contract"
    parser: argparse.ArgumentParser = subparsers.add_parser("check", help=words)
    parser.description = (
        "Check an environment server against docs/contract.md: one that runs at URL, or one that is started from "
        "COMMAND and so can also be killed after it acted. In COMMAND {port}, {uds}, {announce} and {capacity} are "
        "filled in; without the first three the server finds its port in the variable TIDE_PORT (and PORT). Exit code "
        "0: every check passed or was skipped; 1: one failed; 2: wrong use, or no server."
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="http(s)://host:port[/prefix] or unix:/path")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="argv of a server to start")
    parser.add_argument(
        "--pid", type=int, default=0, help="the server's process: may be killed once, if it is restarted"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the bearer token that the server asks for"
    )
    drive = parser.add_argument_group("the environment", "JSON, @FILE with JSON in it, or, for a message, its words")
    drive.add_argument("--environment", metavar="NAME", help="name that starts carry (default: as GET /health says)")
    drive.add_argument("--task", metavar="JSON", help="parameters of each start")
    drive.add_argument("--split", help="data split of each start")
    drive.add_argument(
        "--action", action="append", default=[], help="an action that ends no task; the first is the usual one"
    )
    drive.add_argument("--end-action", action="append", default=[], help="actions that end a task, in their order")
    drive.add_argument("--slow-action", metavar="ACTION", help="an action that takes a second or more")
    which = parser.add_argument_group("the checks")
    which.add_argument(
        "--only", action="append", default=[], metavar="ID", help="only this check, or this group of checks"
    )
    which.add_argument("--list", action="store_true", help="show all checks and what each says; make none")
    which.add_argument("--strict", action="store_true", help="a skipped check fails too")
    which.add_argument("--max-tasks", type=int, default=64, metavar="N", help="tasks at once at most (64)")
    which.add_argument("--timeout-s", type=float, default=60.0, metavar="S", help="for each check (60)")
    which.add_argument("--total-s", type=float, default=900.0, metavar="S", help="for all checks together (900)")
    boot = "until the server is healthy (60 for a command, 10 for a URL)"
    which.add_argument("--boot-s", type=float, metavar="S", help=boot)
    out = parser.add_argument_group("the results")
    out.add_argument("--json", type=Path, metavar="FILE", help="write them as JSON")
    out.add_argument("--junit", type=Path, metavar="FILE", help="write them as JUnit XML")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the checks.

    Raises:
        ServeError: wrong use, or there is no server.
    """
    # Here and not above: `tide-env serve` shall not wait for these imports.
    import asyncio

    from tide_sdk.check.run import select
    from tide_sdk.check.subject import Unreachable
    from tide_sdk.stopping import until_signal

    try:
        cases = select(arguments.only)
    except ValueError as error:
        raise ServeError(str(error)) from error
    if arguments.list:
        for case in cases:
            print(f"{case.name:<21}  {case.says} ({case.section})")
        return 0
    plan = _plan(arguments)
    try:
        results = asyncio.run(until_signal(_check(arguments, plan, cases), "SIGTERM", "SIGHUP"))
    except Unreachable as error:
        raise ServeError(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("tide-env: interrupted", file=sys.stderr)
        return INTERRUPTED
    failed = any(result.result == "fail" or (arguments.strict and result.result == "skip") for result in results)
    return 1 if failed else 0


async def _check(arguments: argparse.Namespace, plan: Plan, cases: Sequence[Case]) -> list[Result]:
    from tide_sdk.check.report import HEAD, row, summary, write_json, write_junit
    from tide_sdk.check.run import run_checks

    colour = sys.stdout.isatty()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # servers say what no terminal's encoding has
    subject = _subject(arguments)
    try:
        await subject.open()
        print(f"{subject.environment} at {subject.url}\n\n{HEAD}", flush=True)
        url = subject.url
        results = await run_checks(
            subject, plan, cases, arguments.total_s, lambda result: print(row(result, colour), flush=True)
        )
    finally:
        await subject.aclose()
    print(f"\n{summary(results)}", flush=True)
    try:
        if arguments.json is not None:
            write_json(arguments.json, url, results)
        if arguments.junit is not None:
            write_junit(arguments.junit, results)
    except OSError as error:
        raise ServeError(f"the results cannot be written: {error}") from error
    return results


def _subject(arguments: argparse.Namespace) -> Subject:
    from tide_sdk.check.launched import Launched
    from tide_sdk.check.subject import Reached

    command = list(arguments.command)
    if command[:1] == ["--"]:
        command = command[1:]
    token = _token(arguments.token_file)
    if arguments.url is None or arguments.url == "--":
        raise ServeError("which server? Give its URL, or a command that starts one after --")
    if "://" not in arguments.url and not arguments.url.startswith("unix:"):
        command = [arguments.url, *command]
    elif command:
        raise ServeError("give the URL of a server or a command that starts one, not both")
    if not command:
        return Reached(arguments.url, arguments.boot_s or URL_BOOT_S, token, arguments.pid)
    if arguments.pid:
        raise ServeError("--pid is for a server at a URL; one that this command starts is killed without it")
    return Launched(command, arguments.boot_s or COMMAND_BOOT_S, min(CAPACITY, arguments.max_tasks), token)


def _plan(arguments: argparse.Namespace) -> Plan:
    from tide_sdk.check.case import USUAL_ACTION, Plan

    for name in ("timeout_s", "total_s", "boot_s"):
        given = getattr(arguments, name)
        if given is not None and not given > 0:
            raise ServeError(f"--{name.replace('_', '-')} must be above 0")
    if arguments.max_tasks < 1:
        raise ServeError("--max-tasks must be at least 1")
    task = None if arguments.task is None else _json("--task", arguments.task)
    if task is not None and not isinstance(task, dict):
        raise ServeError("--task must be a JSON object")
    slow = arguments.slow_action
    actions = tuple(_action("--action", text) for text in arguments.action) or (USUAL_ACTION,)
    return Plan(
        environment=arguments.environment,
        task=cast("dict[str, Any] | None", task),
        split=arguments.split,
        actions=actions,
        end_actions=tuple(_action("--end-action", text) for text in arguments.end_action),
        slow_action=None if slow is None else _action("--slow-action", slow),
        max_tasks=arguments.max_tasks,
        timeout_s=arguments.timeout_s,
    )


def _action(option: str, text: str) -> dict[str, Any]:
    if not text.startswith(("{", "@")):
        return {"role": "assistant", "content": text}
    message = _json(option, text)
    if not isinstance(message, dict):
        raise ServeError(f"{option}: a message is a JSON object, or plain words")
    return {"role": "assistant"} | cast("dict[str, Any]", message)


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise ServeError(f"{option} {text[:80]!r}: {error}") from error


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ServeError(f"--token-file {path}: {error}") from error
