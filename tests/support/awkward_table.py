"""Tables of `environments.toml` for the environments of `awkward_environments`, for a `GatewayCluster`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from gateway_cluster import scripted


def awkward_table(name: str, *, place: str = "uds", own_capacity: int | None = None, **options: Any) -> dict[str, Any]:
    """The table of one class.

    Args:
        name: the class.
        place: `uds` or `port`, where its servers listen.
        own_capacity: tasks that a server holds by its own account; None takes what the gateway gives it.
        options: keys of the table, and under `set` the class's options.
    """
    chosen = [word for item in options.pop("set", {}).items() for word in ("--set", "{}={}".format(*item))]
    command = [sys.executable, "-m", "tide_sdk.cli", "serve", f"awkward_environments:{name}", *chosen]
    command += [f"--{place}", "{" + place + "}", "--capacity", str(own_capacity or "{capacity}")]
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return scripted(command=command, env={"PYTHONPATH": os.pathsep.join(filter(None, paths))}, **options)
