"""A scripted environment server behind a real socket: `python scripted_server.py --uds PATH [--capacity N]`.

The script is the fake runtime's; here the network and the process are real. Without `--uds`, `--port` or `--announce`
it listens where TIDE_UDS or TIDE_PORT say, as an image in a container does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import uvicorn

from tide_gateway.runtimes.scripted import ScriptedEnvironment, ServerDied
from tide_sdk import codec


class App:
    def __init__(self, capacity: int) -> None:
        self.environment = ScriptedEnvironment(capacity)

    async def __call__(self, scope, receive, send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        try:
            status, data = await self.environment.handle(scope["method"], scope["path"], body)
        except ServerDied:
            os._exit(3)
        except ConnectionResetError:
            # Answer nothing that is HTTP's: uvicorn closes the connection.
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            raise
        if status == 201 and (codec.loads(body).get("task") or {}).get("spin"):
            subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])  # noqa: ASYNC220
        answer = codec.dumps(data)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def listen(arguments: argparse.Namespace) -> socket.socket:
    if arguments.uds:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(arguments.uds)
        os.chmod(arguments.uds, 0o666)
        listener.listen(2048)
        return listener
    # A port of 0 is a free one; with protocol 0 asyncio would not set TCP_NODELAY.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((arguments.host, arguments.port))
    listener.listen(2048)
    if arguments.announce:
        host, port = listener.getsockname()[:2]
        part = Path(arguments.announce + ".part")
        part.write_bytes(codec.dumps({"url": f"http://{host}:{port}"}))
        part.replace(arguments.announce)
    return listener


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", default=os.environ.get("TIDE_UDS", ""))
    parser.add_argument("--port", type=int, default=int(os.environ.get("TIDE_PORT", "0")))
    parser.add_argument("--host", default="0.0.0.0" if os.environ.get("TIDE_PORT") else "127.0.0.1")
    parser.add_argument("--announce", default="")
    parser.add_argument("--capacity", type=int, default=int(os.environ.get("TIDE_CAPACITY", "64")))
    arguments = parser.parse_args()
    config = uvicorn.Config(
        App(arguments.capacity), lifespan="off", log_level="warning", http="httptools", access_log=False,
        timeout_keep_alive=75,
    )  # fmt: skip
    asyncio.run(uvicorn.Server(config).serve(sockets=[listen(arguments)]))


if __name__ == "__main__":
    main()
