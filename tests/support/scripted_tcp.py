"""The scripted environment server on a TCP address: `python scripted_tcp.py HOST PORT CAPACITY`, port 0 for any.

It prints its port once it listens.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import uvicorn


async def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
    from scripted_server import App

    host, port, capacity = sys.argv[1:]
    listener = socket.create_server((host, int(port)))
    config = uvicorn.Config(
        App(int(capacity)), lifespan="off", log_level="warning", http="httptools", access_log=False,
        timeout_keep_alive=75,
    )  # fmt: skip
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    asyncio.run(main())
