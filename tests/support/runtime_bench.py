"""What the contract suite of the runtimes needs of each kind, so that one suite tests them all.

Each kind has a module `runtime_bench_KIND` with `bench(folder)`, an async context manager that yields a `RuntimeBench`
and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tide_gateway.runtimes import Runtime, Server
from tide_gateway.specs import EnvironmentSpec

SCRIPTED_SERVER = str(Path(__file__).parents[1] / "gateway" / "scripted_server.py")


@dataclass
class RuntimeBench:
    """One runtime under test.

    Attributes:
        runtime: as the first gateway has it.
        spec: an environment of scripted servers; `spec(healthy=False)` is one whose servers never become healthy.
        again: a further runtime on the same deployment, as a second gateway or a restarted one has it; the bench
            closes it.
        kill: kill a server from outside, as a crash does.
        survives: servers live on after `close`, and another runtime attaches to them.
        owned: `destroy` ends servers and `survey` names them; not where they are somebody else's.
        freezes: the kind can freeze servers.
        num_servers: servers that may live at once.
    """

    runtime: Runtime
    spec: Callable[..., EnvironmentSpec]
    again: Callable[[], Runtime]
    kill: Callable[[Server], Awaitable[None]]
    survives: bool = True
    owned: bool = True
    freezes: bool = True
    num_servers: int = 20
