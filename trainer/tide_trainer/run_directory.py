"""The folder of one run: `runs/NAME/`, never one that an earlier run has used, unless that run is to go on."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tide_trainer.errors import ConfigurationError
from tide_trainer.settings import RunSettings

MAX_RUNS_OF_A_NAME = 10_000


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of a run's files.

    Attributes:
        name: the run's name: the folder's, which may end in a number.
        path: the folder, absolute.
    """

    name: str
    path: Path

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """The configuration as resolved."""
        return self.path / "config.toml"

    @property
    def samples(self) -> Path:
        """Trajectories for the report."""
        return self.path / "samples.json"

    @property
    def trajectories(self) -> Path:
        """Trajectories recorded turn by turn, and their pages."""
        return self.path / "trajectories"

    @property
    def model(self) -> Path:
        """The model that the run starts from, where the run made it."""
        return self.path / "model"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint, which transformers loads."""
        return self.path / "checkpoint"

    @property
    def payloads(self) -> Path:
        """Token payloads, named by hash."""
        return self.path / "payloads"

    @property
    def images(self) -> Path:
        """Images of prompts, named by hash: the store that router, engines and Actor ranks share."""
        return self.path / "images"

    @property
    def logs(self) -> Path:
        """Logs of the run's processes."""
        return self.path / "logs"

    def database_url(self, name: str) -> str:
        """URL of a SQLite file in the folder."""
        return f"sqlite:///{self.path / f'{name}.sqlite3'}"

    @contextmanager
    def held(self, patience_s: float = 0.0) -> Iterator[int]:
        """Keeps other processes from the folder; yields the lock's file descriptor.

        Who inherits the descriptor keeps the lock too: `cluster/guard.py` does, until nothing of the run is left.

        Args:
            patience_s: how long to wait for a former life of the run to end.

        Raises:
            ConfigurationError: another process works in the folder.
        """
        end_s = time.monotonic() + patience_s
        with open(self.path / "run.lock", "ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= end_s:
                        fix = f"{self.path} is in use: the run is alive; stop it first (SIGINT), or wait for it"
                        raise ConfigurationError("--resume", fix) from None
                    time.sleep(0.1)
                else:
                    break
            yield file.fileno()


def run_to_resume(name: str) -> RunDirectory:
    """The folder of a run: given as a path, or by its name under `runs/`.

    Raises:
        ConfigurationError: there is no run in it.
    """
    for path in (Path(name), Path(RunSettings().directory) / name):
        if (path / "config.toml").is_file():
            return RunDirectory(path.absolute().name, path.absolute())
    raise ConfigurationError("--resume", f"{name!r} is no run's folder, nor a name under runs/; give runs/NAME")


def new_run_directory(settings: RunSettings) -> RunDirectory:
    """Makes `NAME`, or `NAME-2`, `NAME-3`, ... where that exists: a fresh run never reads an old run's files.

    Raises:
        ConfigurationError: the folder cannot be made.
    """
    parent = Path(settings.directory).absolute()
    if "?" in str(parent) or "\0" in str(parent):
        # In the URL of a SQLite file a question mark ends the path.
        raise ConfigurationError("run.directory", f"{str(parent)!r} has a '?' or a NUL in it; choose another folder")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, MAX_RUNS_OF_A_NAME):
            name = settings.name if number == 1 else f"{settings.name}-{number}"
            try:
                (parent / name).mkdir()
            except FileExistsError:
                continue
            return RunDirectory(name, parent / name)
    except OSError as error:
        raise ConfigurationError(
            "run.directory", f"{parent}: {error.strerror}; choose a folder that can be written"
        ) from error
    raise ConfigurationError("run.name", f"{MAX_RUNS_OF_A_NAME} runs have this name; choose another")
