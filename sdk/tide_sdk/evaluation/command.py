"""`tide-env eval`: evaluate an agent and a model on an environment."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tide_sdk.serve import ServeError, parse_options

if TYPE_CHECKING:
    from tide_sdk.evaluation.session import Settings

INTERRUPTED = 130
MAX_REPEATS = 10_000
MAX_ATTEMPTS = 100
_NO_SAMPLING = frozenset({"model", "messages", "tools", "stream", "n"})


def add_parser(subparsers: Any) -> None:
    """Add `eval` to the command."""
    words = "evaluate an agent and a model on an environment"
    parser: argparse.ArgumentParser = subparsers.add_parser("eval", help=words)
    parser.description = (
        "Play tasks with an agent and the model of any OpenAI-compatible server, and write results.jsonl, summary.json "
        "and report.html to a folder. Exit code 0: every play has a reward; 1: some have none; 2: wrong use, or "
        "something needed does not answer; 130: interrupted, with a report of what there is. The token of a gateway is "
        "taken from TIDE_GATEWAY_TOKEN."
    )
    where = parser.add_argument_group("the environment")
    where.add_argument(
        "target", nargs="?", metavar="MODULE:CLASS", help="a class to serve for this, or the URL of a server"
    )
    where.add_argument("--gateway", metavar="URL", help="a gateway that hosts the environment")
    where.add_argument("--environment", metavar="NAME", help="its name at the gateway")
    where.add_argument("--set", dest="options", metavar="KEY=VALUE", action="append", default=[], help="of the class")
    who = parser.add_argument_group("the agent and its model")
    who.add_argument("--agent", default="tide_sdk.agents:chat_agent", metavar="MODULE:FUNCTION", help="(chat_agent)")
    who.add_argument("--model-url", required=True, metavar="URL", help="OpenAI base URL, such as http://host:8000/v1")
    who.add_argument("--model", metavar="NAME", help="(the one that the server lists at /models)")
    who.add_argument("--api-key-variable", metavar="NAME", help="environment variable that holds the model's key")
    who.add_argument("--sampling", metavar="KEY=VALUE", action="append", default=[], help="such as temperature=0.7")
    what = parser.add_argument_group("the tasks")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument("--tasks", type=Path, metavar="FILE", help="JSONL: task, seed, split, group, id, all optional")
    source.add_argument("--seeds", metavar="A:B", help="seeds from A on, without B; several between commas")
    what.add_argument("--task", metavar="JSON", help="parameters of each start, with --seeds")
    what.add_argument("--split", help="data split of each start, with --seeds")
    what.add_argument("--repeats", type=int, default=1, metavar="K", help="plays of each task (1)")
    what.add_argument("--success-above", type=float, default=0.0, metavar="R", help="reward of a success (above 0)")
    how = parser.add_argument_group("how it is played")
    how.add_argument("--concurrency", type=int, default=8, metavar="N", help="tasks at once (8)")
    how.add_argument("--attempts", type=int, default=3, help="where the infrastructure fails (3)")
    how.add_argument("--task-timeout-s", type=float, default=3600.0, metavar="S", help="of one attempt (3600)")
    how.add_argument("--call-timeout-s", type=float, default=600.0, metavar="S", help="of one answer (600)")
    how.add_argument("--no-messages", action="store_true", help="keep no conversations")
    out = parser.add_argument_group("the files")
    out.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder, or one to resume")
    out.add_argument("--resume", action="store_true", help="play what is missing or failed by infrastructure")
    out.add_argument("--moved", action="store_true", help="the same servers have other addresses than at the beginning")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate.

    Raises:
        ServeError: wrong use, or something that is needed does not answer.
    """
    # Here and not above: `tide-env serve` shall not wait for these imports.
    import asyncio

    from tide_sdk.evaluation.folder import EvaluationFailed, FolderRefused
    from tide_sdk.evaluation.report import told
    from tide_sdk.evaluation.session import evaluate
    from tide_sdk.many import NotReady
    from tide_sdk.stopping import until_signal

    settings = settings_of(arguments)
    try:
        summary, stopped = asyncio.run(until_signal(evaluate(settings), "SIGTERM", "SIGHUP"))
    except (NotReady, FolderRefused) as error:
        raise ServeError(str(error)) from error
    except EvaluationFailed as error:
        print(f"tide-env: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"tide-env: interrupted; go on with --resume --out {settings.out}", file=sys.stderr)
        return INTERRUPTED
    print(told(summary, settings.out))
    if stopped is not None:
        print(f"tide-env: stopped early: {stopped}; mend it and go on with --resume", file=sys.stderr)
    return 0 if summary.complete else 1


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the command line means.

    Raises:
        ServeError: an option is wrong; the message names it.
    """
    from tide_sdk.agents import load_agent
    from tide_sdk.evaluation.session import Settings
    from tide_sdk.evaluation.tasks import TasksWrong, parse_seeds, read_tasks, seeded_tasks
    from tide_sdk.place import place_of
    from tide_sdk.settings import variable

    for name, most in (("repeats", MAX_REPEATS), ("concurrency", 4096), ("attempts", MAX_ATTEMPTS)):
        if not 1 <= getattr(arguments, name) <= most:
            raise ServeError(f"--{name} must be from 1 to {most}")
    for name in ("task_timeout_s", "call_timeout_s"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise ServeError(f"--{name.replace('_', '-')} must be above 0")
    if not abs(arguments.success_above) < float("inf"):
        raise ServeError("--success-above must be a number")
    if arguments.tasks is not None and (arguments.task is not None or arguments.split is not None):
        raise ServeError("--task and --split go with --seeds; in a file each line has its own")
    key = None
    if arguments.api_key_variable is not None and (key := variable(arguments.api_key_variable)) is None:
        raise ServeError(f"--api-key-variable: the variable {arguments.api_key_variable} is empty or not set")
    place = place_of(arguments.target, arguments.gateway, arguments.environment, arguments.options)
    sys.path.insert(0, str(Path.cwd()))  # an agent may lie beside where the command is given
    try:
        agent = load_agent(arguments.agent)
        if arguments.tasks is not None:
            tasks = read_tasks(arguments.tasks)
        else:
            tasks = seeded_tasks(parse_seeds(arguments.seeds), _object("--task", arguments.task), arguments.split)
    except TasksWrong as error:
        raise ServeError(f"{'--tasks' if arguments.tasks else '--seeds'}: {error}") from error
    except Exception as error:  # the author's module may raise anything while it is imported
        raise ServeError(f"--agent {arguments.agent}: {error}") from error
    return Settings(
        place=place,
        agent=agent,
        agent_name=arguments.agent,
        model_url=arguments.model_url,
        model=arguments.model or "",
        api_key=key or "",
        sampling=_sampling(arguments.sampling),
        tasks=tasks,
        repeats=arguments.repeats,
        threshold=arguments.success_above,
        concurrency=arguments.concurrency,
        attempts=arguments.attempts,
        task_timeout_s=arguments.task_timeout_s,
        call_timeout_s=arguments.call_timeout_s,
        keep_messages=not arguments.no_messages,
        out=arguments.out,
        resume=arguments.resume,
        moved=arguments.moved,
    )


def _sampling(pairs: list[str]) -> dict[str, Any]:
    try:
        sampling = parse_options(pairs)
    except ServeError as error:
        raise ServeError(str(error).replace("--set", "--sampling")) from error
    for name in sampling.keys() & _NO_SAMPLING:
        raise ServeError(f"--sampling {name}: is not for the whole evaluation to say")
    return sampling


def _object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ServeError(f"{option} {text[:80]!r}: {error}") from error
    if not isinstance(found, dict):
        raise ServeError(f"{option} must be a JSON object")
    return cast("dict[str, Any]", found)
