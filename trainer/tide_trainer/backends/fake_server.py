"""The fake engine's server process: `python -m tide_trainer.backends.fake_server --settings FILE --announce FILE`."""

from __future__ import annotations

import logging
from pathlib import Path

import uvloop

from tide_trainer.backends import engine_serve
from tide_trainer.backends.fake_core import FakeCore, FakeSettings


async def _run(settings: FakeSettings, announce: Path) -> None:
    await engine_serve.serve(FakeCore(settings), settings.token, announce)


def main() -> None:
    """Serves until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    engine_serve.install_termination()
    settings, announce = engine_serve.read_arguments(FakeSettings, "A fake rollout engine.")
    uvloop.run(_run(settings, announce))


if __name__ == "__main__":
    main()
