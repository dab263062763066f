"""What a container's connection needs before it exists: a folder for its socket, a network, a free port."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import secrets
import socket
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.docker_container import (
    DEPLOYMENT,
    INTERNAL,
    NETWORK,
    PUBLISHED,
    SOCKET_NAME,
    Way,
    network_config,
)
from tide_gateway.runtimes.docker_engines import Engine
from tide_gateway.runtimes.docker_sdk import EngineRefused
from tide_gateway.specs import DockerOptions

MAX_SOCKET_PATH_BYTES = 107
_CLOSE_S = 10.0
_REMOTE_PORTS = range(20_000, 32_000)


class Ways:
    """Makes and removes what connections need, for one deployment.

    Args:
        deployment: names the networks.
        run_dir: private folder of the sockets' folders; the engine must see it under the same path.

    Raises:
        ValueError: `run_dir` is too long for sockets, or not private.
    """

    def __init__(self, deployment: str, run_dir: Path) -> None:
        self._deployment = deployment
        self._run_dir = run_dir.absolute()
        self._networks: set[Engine] = set()
        self._lock = asyncio.Lock()
        self._ports: dict[str, int] = {}
        if len(os.fsencode(self.socket("x"))) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"run_dir: {run_dir} is too long for unix sockets; set TMPDIR to a shorter path")

    def folder(self, name: str) -> Path:
        """The folder that holds an instance's socket."""
        return self._run_dir / hashlib.sha256(f"{self._deployment}/{name}".encode()).hexdigest()[:12]

    def socket(self, name: str) -> Path:
        """An instance's socket."""
        return self.folder(name) / SOCKET_NAME

    async def make(self, engine: Engine, name: str, options: DockerOptions) -> Way:
        """Make what the instance's connection needs. Safe to repeat.

        Raises:
            LaunchFailed: it cannot be made on this engine.
        """
        if options.connect == "uds":
            if not engine.is_local:
                raise LaunchFailed(f'connect = "uds" needs an engine of this machine, not {engine.url}; take "bridge"')
            return Way(folder=str(self._make_folder(name)), network=options.network or "none")
        if options.connect == "host":
            bind = "127.0.0.1" if engine.is_local else ""
            return Way(port=self._take_port(engine, name), network="host", bind=bind)
        publish = bool(options.address)
        network = options.network or await self._make_network(engine, PUBLISHED if publish else INTERNAL)
        return Way(port=options.port, network=network, publish=_host_ip(options.address) if publish else "")

    def seal(self, name: str) -> None:
        """Take the right to write in the socket's folder from the container, now that its socket is there.

        It could fill this machine's disk otherwise, or put a link to another socket in its own's place.

        Raises:
            LaunchFailed: what is there is no socket, or the gateway may not use it.
        """
        folder, path = self.folder(name), self.socket(name)
        folder.chmod(0o755)
        _empty(folder, keep=path.name)
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise LaunchFailed("the environment server put something else in its socket's place")

    def blocked(self, name: str) -> str:
        """Why the gateway cannot use a socket that is there; "" where it can or there is none."""
        path = self.socket(name)
        if path.exists() and not os.access(path, os.W_OK):
            return (
                f"its socket belongs to user {path.stat().st_uid} alone; let the server make it writable for all, or "
                f'set user = "{os.getuid()}:{os.getgid()}"'
            )
        return ""

    def remove(self, name: str) -> None:
        """Remove the socket's folder and free the port. Safe to repeat."""
        self._ports.pop(name, None)
        _remove(self.folder(name))

    async def close(self) -> None:
        """Remove the deployment's networks that this process used, where no container is in them any more: an engine
        has addresses for a few dozen networks only."""
        for engine in self._networks:
            try:
                for network in await self._list_networks(engine):
                    await engine.call("remove_network", network["Id"], limit_s=_CLOSE_S)
            except (EngineRefused, OSError):  # in use, gone, or out of reach
                continue
        self._networks.clear()

    def _make_folder(self, name: str) -> Path:
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._run_dir.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise LaunchFailed(f"run_dir: {self._run_dir} must belong to the gateway alone (mode 0700)")
        folder = self.folder(name)
        _remove(folder)
        folder.mkdir()
        # Whoever the container's user is: others of this machine cannot get past run_dir.
        folder.chmod(0o777)
        return folder

    def _take_port(self, engine: Engine, name: str) -> int:
        taken = set(self._ports.values())
        while True:
            port = _free_port() if engine.is_local else random.choice(_REMOTE_PORTS)  # noqa: S311 - no secret
            if port not in taken:
                self._ports[name] = port
                return port

    async def _make_network(self, engine: Engine, kind: str) -> str:
        """The id of the deployment's network of that kind. Replicas that ask at once may make one each; all later
        containers join the oldest."""
        async with self._lock:
            self._networks.add(engine)
            for _ in range(3):
                listed = await self._list_networks(engine)
                found = [network for network in listed if (network.get("Labels") or {}).get(NETWORK) == kind]
                if found:
                    return min(found, key=lambda network: (network["Created"], network["Id"]))["Id"]
                await self._create_network(engine, kind)
        raise LaunchFailed(f"networks of the engine {engine.url} are removed as soon as they are made")

    async def _list_networks(self, engine: Engine) -> list[dict[str, Any]]:
        return await engine.call("networks", filters={"label": f"{DEPLOYMENT}={self._deployment}"}, limit_s=_CLOSE_S)

    async def _create_network(self, engine: Engine, kind: str) -> None:
        try:
            await engine.call("create_network", **network_config(self._deployment, kind, secrets.token_hex(4)))
        except EngineRefused as error:
            if "address pool" in str(error):
                raise LaunchFailed(
                    f"the engine {engine.url} has no addresses left for a network: {error}; remove unused networks "
                    "(docker network prune), or give the engine more default-address-pools"
                ) from error
            raise


def _empty(folder: Path, keep: str = "") -> None:
    """Remove all that is in a folder but one name, following no link. Nested folders are lifted until they are flat:
    a container can nest them deeper than `shutil.rmtree` recurses.

    Raises:
        OSError: something cannot be removed, or somebody goes on writing.
    """
    while nested := [path for path in map(Path, _entries(folder)) if _is_left(path, keep)]:
        for path in nested:
            for child in _entries(path):
                os.rename(child, folder / secrets.token_hex(16))
            path.rmdir()


def _entries(folder: Path) -> list[str]:
    with os.scandir(folder) as found:
        return [entry.path for entry in found]


def _is_left(path: Path, keep: str) -> bool:
    """Remove what is no folder; True for a folder."""
    if path.name == keep:
        return False
    if path.is_dir() and not path.is_symlink():
        return True
    path.unlink()
    return False


def _remove(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as that is possible."""
    with contextlib.suppress(OSError):
        _empty(folder)
        folder.rmdir()


def url_host(engine: Engine, options: DockerOptions) -> str:
    """The machine at which published ports and ports of the engine's own network are reached."""
    if options.address or engine.is_local:
        return options.address or "127.0.0.1"
    return urlsplit(engine.url).hostname or ""


def _host_ip(address: str) -> str:
    """What a port is published on: the address itself where it is a number, else all of the engine's machine."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, address)
        except OSError:
            continue
        return address
    return "0.0.0.0"  # noqa: S104 - a host name: which of its addresses is the engine's to know


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
