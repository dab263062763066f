"""The vLLM rollout engine in the main process. Imports neither torch nor vllm: those live in the server process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tide_trainer import types
from tide_trainer.backends import vllm_settings
from tide_trainer.backends.engine_process import EngineProcess, Spawner, new_token
from tide_trainer.backends.vllm_settings import VllmSettings


class VllmEngine(EngineProcess):
    """`protocols.RolloutEngine` over `vllm_server`; see `EngineProcess` for the arguments.

    Raises:
        ConfigurationError: vllm is missing, or the settings cannot work; nothing was started.
    """

    def __init__(
        self,
        rank: types.RankId,
        settings: VllmSettings,
        processes: Spawner,
        directory: str | Path,
        *,
        ready_timeout_s: float = 300.0,
        call_timeout_s: float = 120.0,
    ) -> None:
        vllm_settings.check(settings)
        settings = dataclasses.replace(settings, token=settings.token or new_token())
        super().__init__(
            rank,
            "tide_trainer.backends.vllm_server",
            settings,
            processes,
            directory,
            env=vllm_settings.environment(settings),
            ready_timeout_s=ready_timeout_s,
            call_timeout_s=call_timeout_s,
        )
