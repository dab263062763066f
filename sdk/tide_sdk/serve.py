"""`tide-env serve module:Class`: an environment server process."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import inspect
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from tide_sdk.environment import Environment

KEEP_ALIVE_S = 75
"""Seconds for which an idle connection is kept: longer than any client of ours, so that the client closes first."""
STOP_LIMIT_S = 2
MAX_FILES = 65_536
_PR_SET_PDEATHSIG = 1


class ServeError(Exception):
    """The command cannot run as it was given; the message names what to change."""


def add_parser(subparsers: Any) -> None:
    """Add `serve` to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("serve", help="serve an environment class over HTTP")
    parser.description = (
        "Serve an environment class over HTTP. What is not given is taken from the variables TIDE_ENVIRONMENT "
        "(MODULE:CLASS), TIDE_UDS, TIDE_HOST, TIDE_PORT and TIDE_CAPACITY, which images and the gateway set."
    )
    parser.add_argument("target", nargs="?", metavar="MODULE:CLASS", help="for example my_package.guess:Guess")
    parser.add_argument("--host", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, help="port, 0 lets the system choose (default)")
    parser.add_argument("--uds", metavar="PATH", help="listen on a unix socket instead")
    parser.add_argument("--capacity", type=int, help="tasks held at once (default: the class's own)")
    parser.add_argument("--announce", metavar="FILE", help="write {url, pid} here as JSON once listening")
    parser.add_argument("--set", dest="options", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--allow-public", action="store_true", help="allow a host that other machines can reach")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ServeError: wrong class, option or address.
    """
    if os.environ.get("TIDE_PARENT_DEATH") == "1":
        die_with_parent()
    fill_in(arguments, os.environ)
    if arguments.capacity is not None and arguments.capacity < 1:
        raise ServeError("--capacity (TIDE_CAPACITY) must be at least 1")
    if arguments.uds is None and not arguments.allow_public and not _is_loopback(arguments.host):
        raise ServeError(
            f"--host {arguments.host} can be reached from other machines; give --allow-public if that is meant"
        )
    raise_file_limit()
    options = parse_options(arguments.options)
    environment = load_class(arguments.target)
    try:
        inspect.signature(environment).bind(**options)
    except TypeError as error:
        raise ServeError(f"--set does not fit {arguments.target}: {error}") from error
    listener, url = _listen(arguments)
    try:
        _serve(environment, options, arguments, listener, url)
    finally:
        listener.close()
        if arguments.uds is not None:
            Path(arguments.uds).unlink(missing_ok=True)
    return 0


def _serve(
    environment: type[Environment],
    options: dict[str, Any],
    arguments: argparse.Namespace,
    listener: socket.socket,
    url: str,
) -> None:
    # Here and not above: a wrong call is then refused without the cost of these imports.
    import uvicorn

    from tide_sdk.server import EnvironmentServer

    app = EnvironmentServer(environment, options=options, capacity=arguments.capacity)
    config = uvicorn.Config(
        app,
        http=_protocol(),
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_LIMIT_S,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # nothing here asks where a call comes from
        ws="none",
    )

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Not raised again afterwards as uvicorn does: a stop that was asked for ends with exit code 0.
            self.should_exit = True

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(f"tide-env: {app.name} at {url}", file=sys.stderr, flush=True)
                if arguments.announce is not None:
                    announce(Path(arguments.announce), url)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # First, since uvicorn would cut off without an answer who waits for an environment then.
            await app.aclose()
            await super().shutdown(sockets)

    Server(config).run(sockets=[listener])


def _protocol() -> Any:
    """uvicorn's `http`: its own choice where the faster parser (extra `serve`) is not installed."""
    if importlib.util.find_spec("httptools") is None:
        return "auto"
    from tide_sdk.answering import AnsweringProtocol

    return AnsweringProtocol


def fill_in(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Take what the command line leaves open from the variables of a container, then from the defaults.

    An address on the command line leaves all address variables unread; TIDE_UDS wins over TIDE_HOST and TIDE_PORT. A
    socket that a variable names is open to every user, one that an argument names to its own user alone.

    Args:
        arguments: as parsed; changed in place.
        environ: the process environment; an empty variable counts as unset.

    Raises:
        ServeError: no class is named anywhere, or a variable is not a number.
    """
    arguments.target = arguments.target or environ.get("TIDE_ENVIRONMENT")
    if not arguments.target:
        raise ServeError("which class? Give MODULE:CLASS or set TIDE_ENVIRONMENT")
    arguments.uds_mode = 0o600
    if arguments.capacity is None:
        arguments.capacity = _number(environ, "TIDE_CAPACITY")
    if arguments.host is None and arguments.port is None and arguments.uds is None:
        arguments.uds = environ.get("TIDE_UDS") or None
        # The gateway outside a container is another user; it gave a folder that nobody else gets into.
        arguments.uds_mode = 0o666
        arguments.host = environ.get("TIDE_HOST") or None
        arguments.port = _number(environ, "TIDE_PORT")
    arguments.host = arguments.host or "127.0.0.1"
    arguments.port = arguments.port or 0


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not (text.isascii() and text.isdecimal()):
        raise ServeError(f"{name} must be a whole number, not {text!r}")
    return int(text) if text else None


def load_class(target: str) -> type[Environment]:
    """The class that `module:Class` names; the working directory is searched too.

    Raises:
        ServeError: there is no such module or class, or it is no `Environment`.
    """
    from tide_sdk.environment import Environment

    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        raise ServeError(f"{target!r}: give the class as module:Class")
    try:
        module = import_here(module_name)
    except Exception as error:
        raise ServeError(f"cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ServeError(f"{target!r} is not a subclass of tide_sdk.Environment")
    return found


def import_here(module_name: str) -> ModuleType:
    """Import a module; the working directory is searched too."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    finally:
        sys.path.remove(here)


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`key=value` pairs; a value that is JSON is read as such, anything else is a string.

    Raises:
        ServeError: a pair without a key.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ServeError(f"--set {pair!r}: give it as key=value")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def announce(path: Path, url: str) -> None:
    """Write the address to a file, whole or not at all.

    Args:
        path: the file; an older one is replaced.
        url: `http://host:port` or `unix:/path`.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        json.dump({"url": url, "pid": os.getpid()}, file)
    Path(temporary).replace(path)


def die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies (Linux), so that no server outlives its gateway."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(1)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to `MAX_FILES`, as far as the hard one allows.

    Each call in flight holds one or two, and the usual 1,024 are few.
    """
    try:
        import resource  # not everywhere

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ImportError, OSError, ValueError) as error:
        logging.getLogger("tide_sdk.serve").info("the limit of open files stays: %s", error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(arguments: argparse.Namespace) -> tuple[socket.socket, str]:
    try:
        if arguments.uds is not None:
            path = Path(cast("str", arguments.uds)).absolute()
            if path.is_socket():
                path.unlink()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            path.chmod(arguments.uds_mode)
            url = f"unix:{path}"
        else:
            family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
            # proto is named because asyncio sets TCP_NODELAY only where it is; without it a call takes 40 ms.
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((arguments.host, arguments.port))
            host = f"[{arguments.host}]" if family == socket.AF_INET6 else arguments.host
            url = f"http://{host}:{listener.getsockname()[1]}"
        listener.listen(1024)
        listener.set_inheritable(True)
    except (OSError, OverflowError) as error:
        raise ServeError(
            f"cannot listen on {arguments.uds or f'{arguments.host}:{arguments.port}'}: {error}"
        ) from error
    return listener, url
