"""vLLM's server process: `python -m tide_trainer.backends.vllm_server --settings FILE --announce FILE`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import uvloop

from tide_trainer.backends import engine_serve
from tide_trainer.backends.vllm_core import VllmCore
from tide_trainer.backends.vllm_settings import VllmSettings


async def _run(settings: VllmSettings, announce: Path) -> None:
    core = VllmCore(settings)
    await core.start()
    try:
        await engine_serve.serve(core, settings.token, announce)
    finally:
        core.stop()


def main() -> None:
    """Serves until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    engine_serve.install_termination()
    settings, announce = engine_serve.read_arguments(VllmSettings, "A vLLM rollout engine.")
    code = 1
    try:
        uvloop.run(_run(settings, announce))
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        logging.getLogger(__name__).exception("the engine ended")
    finally:
        # Tearing the interpreter down under torch's threads takes seconds and may crash.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
