"""The fake rollout engine: the real server process and HTTP surface over `fake_core`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tide_trainer import types
from tide_trainer.backends.engine_process import EngineProcess, Spawner, new_token
from tide_trainer.backends.fake_core import FakeSettings


class FakeEngine(EngineProcess):
    """`protocols.RolloutEngine` for tests and dry runs; see `EngineProcess` for the arguments."""

    def __init__(
        self,
        rank: types.RankId,
        settings: FakeSettings,
        processes: Spawner,
        directory: str | Path,
        *,
        ready_timeout_s: float = 60.0,
        call_timeout_s: float = 60.0,
    ) -> None:
        settings = dataclasses.replace(settings, token=settings.token or new_token())
        super().__init__(
            rank,
            "tide_trainer.backends.fake_server",
            settings,
            processes,
            directory,
            ready_timeout_s=ready_timeout_s,
            call_timeout_s=call_timeout_s,
        )
