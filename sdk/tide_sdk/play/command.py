"""`tide-env play`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, cast

from tide_sdk.serve import ServeError

INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    """Add `play` to the command."""
    words = "play an environment yourself, in the terminal"
    parser: argparse.ArgumentParser = subparsers.add_parser("play", help=words)
    parser.description = (
        "Play one task of an environment: a class, which is served for this alone, a server at a URL, or an "
        "environment's name at a gateway, whose token is taken from TIDE_GATEWAY_TOKEN. The lines may also come from a "
        "pipe. Exit code 0: the task was played or left; 1: the environment failed; 2: wrong use, or nobody answers."
    )
    parser.add_argument("target", metavar="TARGET", help="MODULE:CLASS, a URL, or a name with --gateway")
    parser.add_argument("--gateway", metavar="URL", help="the gateway that hosts the environment")
    parser.add_argument("--environment", metavar="NAME", help="name that the start carries, with a server's URL")
    parser.add_argument("--set", dest="options", metavar="KEY=VALUE", action="append", default=[], help="of the class")
    parser.add_argument("--task", metavar="JSON", help="parameters of the start")
    parser.add_argument("--seed", type=int, help="the episode's seed")
    parser.add_argument("--split", help="the data split")
    parser.add_argument("--kind", choices=("train", "eval"), default="eval", help="(eval)")
    parser.add_argument("--images", type=Path, metavar="DIR", default=Path("images"), help="for images (images/)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Play.

    Raises:
        ServeError: wrong use, or nobody answers.
    """
    # Here and not above: `tide-env serve` shall not wait for these imports.
    import asyncio

    from tide_sdk.errors import TideError
    from tide_sdk.http_connection import TransportError
    from tide_sdk.place import place_of, reached
    from tide_sdk.play.session import Keyboard, PlaySession, Wanted
    from tide_sdk.play.shown import Shown, safe
    from tide_sdk.settings import gateway_token

    place = place_of(arguments.target, arguments.gateway, arguments.environment, arguments.options)
    task = _task(arguments.task)
    _expect_stops()
    colour = sys.stdout.isatty()
    shown = Shown(arguments.images, colour=colour)
    keyboard = Keyboard(sys.stdin, sys.stdout)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            entering = stack.enter_async_context(reached(place, gateway_token(), 1, references=False))
            gateway, environment = runner.run(_of(entering))
            wanted = Wanted(environment, task, arguments.seed, arguments.split, arguments.kind)
            account = PlaySession(gateway, runner, keyboard, shown, _say).play(wanted)
        except (TideError, TransportError) as error:
            raise ServeError(safe(str(error))) from error
        except OSError as error:  # the task was ended; only nobody could be told
            raise ServeError(f"the output cannot be written: {error.strerror or error}") from error
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            runner.run(stack.aclose())
    return 1 if account is None or account.outcome.kind == "failed" else 0


async def _of(awaitable: Any) -> Any:
    """What is awaited, as the coroutine that a runner wants."""
    return await awaitable


def _expect_stops() -> None:
    """SIGTERM and SIGHUP leave the task as Ctrl-C does; what no terminal's encoding has is written out."""
    from tide_sdk.stopping import interrupt_on

    interrupt_on("SIGTERM", "SIGHUP")
    for stream in (sys.stdout, sys.stdin):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody reads any more; the task is still ended in order
        print(text, flush=True)


def _task(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ServeError(f"--task {text[:80]!r}: {error}") from error
    if not isinstance(found, dict):
        raise ServeError("--task must be a JSON object")
    return cast("dict[str, Any]", found)
