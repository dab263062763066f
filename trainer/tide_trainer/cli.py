"""The command `tide-train`. Exit codes: 0 done, 1 the run failed, 2 wrong configuration, 130 interrupted."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from tide_sdk.stopping import interrupt_on, until_signal
from tide_trainer.config_file import load
from tide_trainer.errors import ConfigurationError, TrainerError
from tide_trainer.settings import TrainerSettings

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130
_STOPS = ("SIGTERM", "SIGHUP")
"""Signals that end a command as Ctrl-C does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        interrupt_on(*_STOPS)  # until the run takes the signals itself
        return arguments.command(arguments)
    except ConfigurationError as error:
        print(f"tide-train: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except TrainerError as error:
        print(f"tide-train: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tide-train", description="Train LLM agents by reinforcement learning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in (("run", "train an agent"), ("sft", "only the warm start, saved as a checkpoint")):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "config", nargs="?" if name == "run" else None, help="TOML file, for example examples/quickstart.toml"
        )
        if name == "run":
            command.add_argument(
                "--resume",
                metavar="RUN",
                help="instead of CONFIG: go on with a run from its newest checkpoint; its folder, or its name in runs",
            )
        command.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="override a setting")
        command.add_argument(
            "--dry-run", action="store_true", help="check everything, start nothing, print the settings"
        )
        command.add_argument("--max-steps", type=int, metavar="N", help="as --set run.max_train_steps=N")
        command.add_argument("--max-time", type=float, metavar="SECONDS", help="as --set run.max_time_s=SECONDS")
        command.set_defaults(command=_run if name == "run" else _sft)
    _add_eval(commands)
    report = commands.add_parser("report", help="write report.html of a run's folder again")
    report.add_argument("run_directory", type=Path)
    report.set_defaults(command=_report)
    trajectory = commands.add_parser("trajectory", help="write the page of one recorded trajectory, turn by turn")
    trajectory.add_argument("run_directory", type=Path)
    trajectory.add_argument("uid", nargs="?", help="for example eval/0/sampled/1; without it, the newest")
    trajectory.add_argument("--list", action="store_true", help="list what is recorded, write nothing")
    trajectory.add_argument("--out", type=Path, metavar="FILE", help="default: trajectories/NAME.html in the folder")
    trajectory.set_defaults(command=_trajectory)
    migrate = commands.add_parser("migrate", help="bring a trainer database to the newest schema")
    migrate.add_argument("--database-url", required=True, help="SQLAlchemy URL, for example sqlite:///trainer.sqlite3")
    migrate.set_defaults(command=_migrate)
    return parser


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "evaluate a checkpoint on the held-out seeds"
    command = commands.add_parser(
        "eval",
        help=text,
        description="Evaluate a checkpoint on the held-out seeds, on the engines of the configuration, without Actor "
        "ranks. Writes results.jsonl, summary.json and report.html for each way. Exit code 0: every play has a reward; "
        "1: some have none, or a part failed; 2: wrong configuration; 130: interrupted, what there is is reported.",
    )
    command.add_argument("config", help="TOML file, for example runs/NAME/config.toml")
    command.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="for example runs/NAME/checkpoint"
    )
    command.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="override a setting")
    command.add_argument(
        "--way", choices=("sampled", "greedy", "both"), default="sampled", help="temperature 1, 0, or both (sampled)"
    )
    command.add_argument("--repeats", type=int, default=1, metavar="K", help="sampled plays of each seed (1)")
    command.add_argument("--success-above", type=float, default=0.0, metavar="R", help="reward of a success (above 0)")
    command.add_argument("--out", type=Path, metavar="DIR", help="(a new folder NAME-eval beside the runs)")
    command.add_argument("--resume", action="store_true", help="play what is missing or failed by infrastructure")
    command.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    from tide_trainer import evaluate, preflight

    if not 1 <= arguments.repeats <= 10_000:
        raise ConfigurationError("--repeats", "must be from 1 to 10000")
    if arguments.resume and arguments.out is None:
        raise ConfigurationError("--resume", "needs --out, the folder to go on with")
    settings = evaluate.settings_for(load(arguments.config, arguments.set), arguments.checkpoint)
    preflight.check(settings)
    ways = ("sampled", "greedy") if arguments.way == "both" else (arguments.way,)
    order = evaluate.Order(
        arguments.checkpoint, ways, arguments.repeats, arguments.success_above, arguments.out, arguments.resume
    )
    return _to_the_end(evaluate.evaluate(settings, order))


def _settings(arguments: argparse.Namespace) -> TrainerSettings:
    overrides = list(arguments.set)
    if arguments.max_steps is not None:
        overrides.append(f"run.max_train_steps={arguments.max_steps}")
    if arguments.max_time is not None:
        overrides.append(f"run.max_time_s={arguments.max_time}")
    return load(arguments.config, overrides)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        return _resume(arguments)
    if arguments.config is None:
        raise ConfigurationError("CONFIG", "is missing; give a TOML file, or --resume RUN")
    return _start(arguments, only_warm_start=False)


def _sft(arguments: argparse.Namespace) -> int:
    return _start(arguments, only_warm_start=True)


def _start(arguments: argparse.Namespace, *, only_warm_start: bool) -> int:
    from tide_trainer import preflight, run

    settings = _settings(arguments)
    if only_warm_start and not settings.warm_start.enabled:
        raise ConfigurationError("warm_start.enabled", "is false; set it to true for tide-train sft")
    preflight.check(settings)
    if arguments.dry_run:
        import tomli_w

        print(tomli_w.dumps(run.plain(settings)))
        print(f"{arguments.config} is right; nothing was started (--dry-run)", file=sys.stderr)
        return 0
    return _to_the_end(run.run(settings, only_warm_start=only_warm_start))


def _resume(arguments: argparse.Namespace) -> int:
    from tide_trainer import preflight, run
    from tide_trainer.run_directory import run_to_resume

    if arguments.config is not None:
        raise ConfigurationError("CONFIG", "goes not with --resume, which takes the run's own; change it with --set")
    directory = run_to_resume(arguments.resume)
    arguments.config = directory.config
    settings = _settings(arguments)
    preflight.check(settings)
    if arguments.dry_run:
        print(f"{directory.path} can go on; nothing was started (--dry-run)", file=sys.stderr)
        return 0
    return _to_the_end(run.run(settings, resumed=directory))


def _to_the_end(running: Coroutine[Any, Any, int]) -> int:
    """Runs the coroutine; the first signal cancels it, and it ends in order, whatever follows."""

    def again() -> None:
        print("tide-train: is stopping already; its prompts and processes are being accounted for", file=sys.stderr)

    try:
        return asyncio.run(until_signal(running, "SIGINT", *_STOPS, again=again))
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED


def _report(arguments: argparse.Namespace) -> int:
    from tide_trainer.report.html import main_report

    return main_report(arguments.run_directory)


def _trajectory(arguments: argparse.Namespace) -> int:
    from tide_trainer.report.replay_list import main_trajectory

    return main_trajectory(arguments.run_directory, arguments.uid, only_list=arguments.list, out=arguments.out)


def _migrate(arguments: argparse.Namespace) -> int:
    from tide_trainer.persistence.migrate import migrate_database

    print("\n".join(migrate_database(arguments.database_url)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
