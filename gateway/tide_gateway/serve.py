"""Runs the gateway: binds, migrates, opens the service, serves, and stops it whole."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tide_gateway.app import GatewayApp
from tide_gateway.auth import Owners
from tide_gateway.blobs import BlobStore
from tide_gateway.connections import ConnectionLimits, guarded_protocol
from tide_gateway.database import Database, FileLock, StorageFailed, database_url
from tide_gateway.hosting import make_runtimes
from tide_gateway.keys import KeyStore
from tide_gateway.private import data_folder, make_private_file
from tide_gateway.repository import Repository
from tide_gateway.service.tasks import TaskService
from tide_gateway.settings import GatewaySettings, SettingsError, check_bind, check_tls, is_loopback
from tide_gateway.timekeeping import DatabaseTime
from tide_sdk import codec
from tide_sdk.migrations import migrate
from tide_sdk.serve import raise_file_limit

DRAIN_S = 3.0
SYNC_S = 5.0
MIN_OUTLIVE_S = 0.1
# Turns leave hardly any cycles; looking for them after every 700 new objects costs a twelfth of all CPU.
GC_OBJECTS = 20_000
# Longer than any client keeps an idle connection, so that it is the client that closes it.
KEEP_ALIVE_S = 75

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `tide-gateway serve` was told.

    Attributes:
        port: 0 takes a free one.
        data: folder of logs and blobs, one for all replicas; None takes one beside a SQLite file.
        outlive_s: seconds that `process` servers outlive a killed gateway.
        keep: a stop leaves tasks and servers to the next gateway.
        announce: file that gets `{"url", "pid"}` once requests are answered.
        tls_cert, tls_key: PEM files, both or none: then only https is spoken.
    """

    host: str
    port: int
    database: str
    announce: Path | None
    log_level: str
    data: Path | None = None
    outlive_s: float = 120.0
    keep: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None


class _Server(uvicorn.Server):
    """uvicorn that announces itself and leaves signals to us."""

    def __init__(self, config: uvicorn.Config, url: str, announce: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Nothing: our handlers stay for the whole stop, which uvicorn's would not."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, then tell whoever waits for it."""
        await super().startup(sockets)
        log.info("serving on %s", self._url)
        if self._announce is not None:
            _announce(self._announce, self._url)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        SettingsError: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    # With protocol 0 asyncio would not set TCP_NODELAY, and each answer would wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
    except (OSError, OverflowError, UnicodeError) as error:
        listener.close()
        words = "not a port" if isinstance(error, OverflowError) else getattr(error, "strerror", "not a host name")
        raise SettingsError(f"--host {host} --port {port}: cannot listen: {words}; choose another, or 0") from error
    listener.setblocking(False)
    return listener


async def serve(settings: GatewaySettings, options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM; everything is stopped when this returns.

    Raises:
        SettingsError, DatabaseError, DatabaseTooNew: nothing was started.
    """
    check_tls(options.tls_cert, options.tls_key)
    # Supervisors look every fifth of it; NaN is no number of seconds either.
    if options.outlive_s != 0 and not options.outlive_s >= MIN_OUTLIVE_S:
        words = f"must be 0, or {MIN_OUTLIVE_S:g} or more seconds"
        raise SettingsError(f"--outlive-s {options.outlive_s:g}: {words}")
    _check_announce(options.announce)
    url = database_url(options.database)
    data = data_folder(options.data, url)
    raise_file_limit()
    lock = listener = None
    try:
        if url.get_backend_name() == "sqlite":
            # The real path: a second name of the file must not open it to a second gateway.
            path = Path(os.path.realpath(str(url.database)))  # noqa: ASYNC240 (nothing is served yet)
            lock = FileLock(path.with_name(path.name + ".lock"))
            lock.take()
            make_private_file(path)
        await asyncio.to_thread(migrate, "gateway", url)
        database = Database(url)
        try:
            has_keys = (await KeyStore(database).table()).ever
            check_bind(options.host, settings, has_keys=has_keys)
            listener = bind(options.host, options.port)
            await _run(settings, options, database, data, listener)
        finally:
            await database.close()
    finally:
        if listener is not None:
            listener.close()
        if lock is not None:
            lock.free()


async def _run(
    settings: GatewaySettings, options: ServeOptions, database: Database, data: Path, listener: socket.socket
) -> None:
    repository = Repository(database, BlobStore(data / "blobs"))
    deployment, seen_s = await repository.replicas.deployment()
    time = DatabaseTime()
    await time.sync(database)
    time.not_before(seen_s)
    left = {row.runtime for row in await repository.instances.all()}
    runtimes = await make_runtimes(settings, deployment, data, options.outlive_s, left)
    service = TaskService(settings.environments, runtimes, repository, time)
    owners = Owners(settings.tokens, KeyStore(database), allow_anonymous=is_loopback(options.host))
    server = _make_server(GatewayApp(service, owners, data / "logs"), options, listener)

    # A second signal changes nothing: the stop is bounded.
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    syncing = asyncio.create_task(_keep_time(time, database), name="tide-time")
    try:
        await service.open()
        _spare_collections()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        # HTTP goes on while the service stops, so that every waiting call is answered.
        await service.stop(DRAIN_S, keep=options.keep)
        server.should_exit = True
        await serving
    finally:
        syncing.cancel()
        await service.stop(drain_s=0.0, keep=options.keep)
        if options.announce is not None:
            options.announce.unlink(missing_ok=True)
        log.info("stopped")


def _spare_collections() -> None:
    """Collect cycles rarely, and never look through the modules again, which live to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)


async def _keep_time(time: DatabaseTime, database: Database) -> None:
    """Correct the time by the database's clock, for ever."""
    while True:
        await asyncio.sleep(SYNC_S)
        try:
            await time.sync(database)
        except StorageFailed as error:
            log.warning("the database's time could not be read: %s", error)


def _make_server(app: GatewayApp, options: ServeOptions, listener: socket.socket) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=options.log_level,
        access_log=False,
        lifespan="off",
        http=guarded_protocol(ConnectionLimits()),
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        ws="none",
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        backlog=4096,
    )
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.tls_cert is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    return _Server(config, url, options.announce)


def _part(path: Path) -> Path:
    # Written beside and renamed: a reader never sees half of it.
    return path.with_name(path.name + ".part")


def _check_announce(path: Path | None) -> None:
    """Refuse a file that could not be written once everything runs."""
    if path is None:
        return
    try:
        _part(path).write_bytes(b"")
        _part(path).unlink()
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--announce {path}: cannot be written: {error}; name a file in a folder of yours"
        ) from error


def _announce(path: Path, url: str) -> None:
    part = _part(path)
    part.write_bytes(codec.dumps({"url": url, "pid": os.getpid()}))
    part.replace(path)
