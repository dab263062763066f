"""Cells, policies and runs of `bench_ctb`, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tide_trainer.simulation import policies
from tide_trainer.simulation.policies import PolicyFactory

UNLIMITED = "all"
CTB = "ctb"
MAIN = "main"


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of cache and environments.

    Attributes:
        kv_tokens: the engine's cache; 636 tokens are a task of mean final length.
        latency_s: mean time of an environment's turn.
        fixed: the fixed concurrencies that are tried.
        num_groups: groups of `GROUP_SIZE` tasks.
    """

    name: str
    kv_tokens: int
    latency_s: float
    fixed: tuple[int, ...]
    num_groups: int = 10

    @property
    def num_tasks(self) -> int:
        """Tasks of all groups."""
        return self.num_groups * GROUP_SIZE


GROUP_SIZE = 8
CELLS = {
    cell.name: cell
    for cell in (
        Cell(MAIN, 5088, 0.5, (8, 12, 16, 32)),
        Cell("latency-0.1", 5088, 0.1, (6, 8, 12, 16), num_groups=5),
        Cell("latency-2", 5088, 2.0, (12, 16, 24), num_groups=5),
        Cell("cache-4", 2560, 0.5, (4, 6, 8), num_groups=5),
        Cell("cache-24", 15_264, 0.5, (24, 32, 48)),
    )
}
TUNING_SEEDS = (1,)
"""On these the strongest fixed concurrency of the main cell is chosen, of `TUNED`."""

TUNED = ("fixed-8", "fixed-12", "fixed-16")
"""The others reach six tenths of these at most, as the compared seeds show; tuning them too would take minutes."""

QUICK = ("ctb", *TUNED, "fixed-all")

SEEDS = (11, 12, 13)
"""On these the policies are compared; nothing was tuned on them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy plays one cell's tasks of one seed."""

    cell: Cell
    policy: str
    seed: int


def policy_names(cell: Cell) -> list[str]:
    """The policies of a cell, CTB first."""
    fixed = [f"fixed-{number}" for number in cell.fixed]
    if cell.name != MAIN:
        return [CTB, *fixed]
    return [CTB, *fixed, f"fixed-{UNLIMITED}", "aimd", "algorithm-1"]


def factory_of(policy: str, cell: Cell) -> PolicyFactory:
    """A policy by its name. Raises ValueError."""
    name, _, number = policy.partition("-")
    if name == "fixed" and (number == UNLIMITED or number.isdecimal()):
        return policies.fixed(cell.num_tasks if number == UNLIMITED else int(number))
    made = {CTB: policies.ctb, "aimd": policies.aimd, "algorithm-1": policies.algorithm_one}.get(policy)
    if made is None:
        raise ValueError(f"--policy {policy}: give ctb, aimd, algorithm-1, fixed-N or fixed-all")
    return made()


def runs_of(cell: Cell, seeds: Sequence[int], names: Sequence[str]) -> Iterator[Run]:
    """Interleaved: every policy once per seed; each seed begins with another one."""
    for number, seed in enumerate(seeds):
        first = number * 3 % len(names)
        for name in (*names[first:], *names[:first]):
            yield Run(cell, name, seed)
