"""`tide-env`: write an environment, serve its class, check a server; play and evaluate without a trainer.

Each subcommand is a module with `add_parser(subparsers)`; it sets `run`, a function of the parsed arguments that
returns the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tide_sdk import new, serve
from tide_sdk.check import command as check
from tide_sdk.evaluation import command as evaluation
from tide_sdk.play import command as play


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0 on success, 2 if it was called wrongly."""
    parser = argparse.ArgumentParser(
        prog="tide-env", description="Write, serve, check and play environments, and evaluate agents."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    serve.add_parser(subparsers)
    check.add_parser(subparsers)
    new.add_parser(subparsers)
    play.add_parser(subparsers)
    evaluation.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except serve.ServeError as error:
        print(f"tide-env: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
