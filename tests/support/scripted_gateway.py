"""A gateway process with static tokens and one scripted environment, named as in the examples of `/openapi.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gateway_process import Replica, place

ENVIRONMENT = "babyai"
SERVER = str(Path(__file__).parents[1] / "gateway" / "scripted_server.py")
TABLE = """
[environments.{name}]
command = {command}
capacity = 512
[environments.{name}.limits]
start = 30
idle = 20
turn = 10
active = 100
end = 5
"""


def start_gateway(folder: Path, database: str, tokens: str) -> Replica:
    """Start it; the caller stops it.

    Args:
        folder: for its files.
        database: the URL of its database.
        tokens: as in TIDE_GATEWAY_TOKENS.
    """
    config = folder / "environments.toml"
    command = [sys.executable, SERVER, "--uds", "{uds}", "--capacity", "{capacity}"]
    config.write_text(TABLE.format(name=ENVIRONMENT, command=json.dumps(command)))
    replica = place(folder, 0)
    argv = [sys.executable, "-m", "tide_gateway", "serve", "--config", str(config), "--port", str(replica.port)]
    argv += ["--database", database, "--data", str(folder / "data"), "--announce", str(replica.announce)]
    replica.start(argv, os.environ | {"TIDE_GATEWAY_TOKENS": tokens})
    replica.wait_ready()
    return replica
