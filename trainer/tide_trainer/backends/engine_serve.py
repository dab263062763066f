"""The server process of an engine: settings file in, loopback socket, announce file out, orderly end on SIGTERM."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from tide_sdk.answering import AnsweringProtocol
from tide_sdk.serve import announce
from tide_trainer.backends.engine_app import EngineApp, ServedEngine

_SettingsT = TypeVar("_SettingsT")
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_GRACE_S = 2


def read_arguments(settings_type: type[_SettingsT], description: str) -> tuple[_SettingsT, Path]:
    """Parses `--settings FILE --announce FILE`; the settings file is JSON with the fields of a dataclass.

    Returns:
        The settings, and where to announce.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--settings", required=True, type=Path, help="JSON file, readable by its owner only")
    parser.add_argument("--announce", required=True, type=Path, help="file to write {url, pid} to when it serves")
    arguments = parser.parse_args()
    return settings_type(**json.loads(arguments.settings.read_text(encoding="utf-8"))), arguments.announce


def install_termination() -> None:
    """Makes SIGTERM and SIGINT end the process in order, with exit code 0, also while it boots."""
    # uvicorn takes the signals while it serves, and raises them again when it has shut down.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))


def write_settings(path: Path, settings: Any) -> None:
    """Writes a settings dataclass for `read_arguments`, readable by its owner only: it may hold a token."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(settings), file)


def listen() -> socket.socket:
    """A listening loopback socket on a free port."""
    # With the protocol named, the event loop sets TCP_NODELAY on each connection (44 ms a call otherwise).
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(_BACKLOG)
    return listener


async def serve(engine: ServedEngine, token: str | None, announce_path: Path) -> None:
    """Serves an engine on a free loopback port, announces it, and returns after SIGTERM or SIGINT."""
    config = uvicorn.Config(
        EngineApp(engine, token),
        http=AnsweringProtocol,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    listener = listen()
    announce(announce_path, f"http://127.0.0.1:{listener.getsockname()[1]}")
    await uvicorn.Server(config).serve(sockets=[listener])
