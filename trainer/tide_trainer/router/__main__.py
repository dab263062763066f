"""`python -m tide_trainer.router`: the router's process; it ends with its channel to the main process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from tide_sdk.answering import AnsweringProtocol
from tide_sdk.collector import spare_collections
from tide_sdk.serve import KEEP_ALIVE_S, announce, raise_file_limit
from tide_trainer.channel import Channel, connect_channel
from tide_trainer.images import ImageStore
from tide_trainer.loop_lag import LoopLag
from tide_trainer.router.app import RouterApp
from tide_trainer.router.calls import Calls
from tide_trainer.router.control import Control
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.reply_format import REASONING_FORMATS, TOOL_FORMATS
from tide_trainer.router.state import Limits

_EXPIRE_EVERY_S = 60.0
_STOP_LIMIT_S = 2


class _Server(uvicorn.Server):
    """uvicorn's server; a stop that was asked for ends with exit code 0 and cancels held calls."""

    app: RouterApp
    announce_to: Path
    url: str

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            announce(self.announce_to, self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.app.close()
        self.should_exit = True


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or until the main process is gone."""
    renderer = Renderer(
        arguments.model_dir, tool_format=arguments.tool_format, reasoning_format=arguments.reasoning_format
    )
    limits = Limits(
        hold_timeout_s=arguments.hold_timeout_s,
        engine_timeout_s=arguments.engine_timeout_s,
        keep_alive_s=arguments.keep_alive_s,
    )
    lag = LoopLag()
    channel: Channel | None = None

    def notify(name: str, payload: dict[str, Any]) -> None:
        # Between the main process's end and ours there is nobody to tell.
        if channel is not None and not channel.closed:
            channel.notify(name, payload)

    images = ImageStore(arguments.image_folder) if arguments.image_folder else None
    calls = Calls(renderer, notify, limits, arguments.model_name, images)
    control = Control(renderer, calls, limits, lag.take_max_s)
    app = RouterApp(control, calls, renderer, notify, limits, arguments.model_name)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((arguments.host, arguments.port))
    listener.listen(4096)
    url = f"http://{arguments.host}:{listener.getsockname()[1]}"
    server = _Server(
        uvicorn.Config(
            app,
            http=AnsweringProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            date_header=False,
            proxy_headers=False,  # nothing here asks where a call comes from
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_LIMIT_S,
        )
    )
    server.app, server.announce_to, server.url = app, Path(arguments.announce), url
    channel = await connect_channel(arguments.control, control.handlers(), name="router")
    channel.on_close(lambda _: server.handle_exit(0, None))
    spare_collections()
    tasks = [asyncio.create_task(lag.run()), asyncio.create_task(_expire(control, notify))]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await calls.close()
        channel.close()
        listener.close()


async def _expire(control: Control, notify: Any) -> None:
    while True:
        await asyncio.sleep(_EXPIRE_EVERY_S)
        for name in control.expire(time.monotonic()):
            notify("session_expired", {"session": name})


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m tide_trainer.router", description=__doc__)
    parser.add_argument("--control", required=True, metavar="SOCKET", help="channel of the main process")
    parser.add_argument("--announce", required=True, metavar="FILE", help="write {url, pid} here once serving")
    parser.add_argument("--model-dir", required=True, help="folder with the tokenizer and its chat template")
    parser.add_argument("--tool-format", default="auto", choices=TOOL_FORMATS, help="how tool calls are written")
    parser.add_argument("--reasoning-format", default="auto", choices=REASONING_FORMATS, help="how thinking is marked")
    parser.add_argument("--image-folder", metavar="FOLDER", help="the run's images; without it none are taken")
    parser.add_argument("--model-name", default="policy", help="the model's name in answers")
    parser.add_argument("--host", default="127.0.0.1", choices=["127.0.0.1"], help="loopback only")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--hold-timeout-s", type=float, default=3600.0, help="longest wait of a call for its grant")
    parser.add_argument("--engine-timeout-s", type=float, default=300.0, help="longest generation")
    parser.add_argument("--keep-alive-s", type=float, default=10.0, help="a held stream gets a comment so often")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    arguments = parser.parse_args()
    raise_file_limit()  # a held call holds a connection
    uvloop.run(serve(arguments))


if __name__ == "__main__":
    main()
