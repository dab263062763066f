"""A scripted environment server behind a real socket: `python scripted_server.py --uds PATH [--capacity N]`.

The script is the fake runtime's; here the network and the process are real.
"""

from __future__ import annotations

import argparse
import asyncio
import os

import uvicorn

from tide_gateway.runtimes.fake import ScriptedEnvironment, ServerDied
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
        answer = codec.dumps(data)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--capacity", type=int, default=64)
    arguments = parser.parse_args()
    config = uvicorn.Config(
        App(arguments.capacity), uds=arguments.uds, lifespan="off", log_level="warning", http="httptools",
        access_log=False, timeout_keep_alive=75,
    )  # fmt: skip
    asyncio.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
