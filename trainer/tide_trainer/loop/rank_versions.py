"""Which model version each living rollout rank serves, and which anchored tasks depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from tide_trainer.errors import RunFailed
from tide_trainer.loop.shell_task import ShellTask
from tide_trainer.types import RankId


class RankVersions:
    """The versions of the ranks.

    Attributes:
        newest: the version of the last weight sync; before the first, the one that the ranks booted with.

    Args:
        tasks: the shell's tasks, which know their version and the rank of their last call.
    """

    def __init__(self, tasks: Mapping[str, ShellTask]) -> None:
        self._tasks = tasks
        self._versions: dict[RankId, int] = {}
        self.newest = 0

    def living(self) -> frozenset[RankId]:
        """The living rollout ranks."""
        return frozenset(self._versions)

    def of(self, rank: RankId) -> int:
        """What a rank serves; the newest version for one that is gone."""
        return self._versions.get(rank, self.newest)

    def add(self, rank: RankId, version: int) -> None:
        """A rank came up with a version."""
        self.newest = max(self.newest, version) if self._versions else version
        self._versions[rank] = version

    def remove(self, rank: RankId) -> None:
        """A rank is gone."""
        self._versions.pop(rank, None)

    def served(self, version: int, ranks: Set[RankId] | None = None) -> frozenset[RankId]:
        """A weight sync brought ranks (None: all) to a version; returns them, those that are gone left out."""
        found = self.living() if ranks is None else frozenset(ranks) & self.living()
        self._versions |= dict.fromkeys(found, version)
        self.newest = max(self.newest, version)
        return found

    def best_keeper(self, version: int) -> RankId | None:
        """The rank serving `version` that had most of the live tasks anchored to it; None where none serves it."""
        tasks = Counter(task.rank for task in self._tasks.values() if task.version == version)
        serving = sorted(rank for rank, served in self._versions.items() if served == version)
        return max(serving, key=lambda rank: tasks[rank], default=None)

    def lost(self, version: int | None) -> bool:
        """Whether what is anchored to the version has no rank any more; False for what is not anchored."""
        return version is not None and version not in self._versions.values()

    def check_closing(self, ranks: Set[RankId]) -> None:
        """Raises RunFailed if closing these ranks would strand a live anchored task that one of them serves."""
        closing = {version for rank, version in self._versions.items() if rank in ranks}
        closing -= {version for rank, version in self._versions.items() if rank not in ranks}
        for task in self._tasks.values():
            if task.version in closing:
                raise RunFailed(
                    f"evaluation task {task.session} of version {task.version} would lose its last rank to a weight "
                    "sync: its evaluation should have ended, or kept a rank; report this as a bug"
                )
