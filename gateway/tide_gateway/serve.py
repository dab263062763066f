"""Runs the gateway: binds, migrates, opens the service, serves, and stops it whole."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import uvicorn

from tide_gateway.app import GatewayApp
from tide_gateway.auth import Owners
from tide_gateway.blobs import BlobStore
from tide_gateway.connection_limits import ConnectionLimits
from tide_gateway.connections import guarded_protocol
from tide_gateway.database import Database, FileLock, StorageFailed, database_url
from tide_gateway.handshakes import tls_context
from tide_gateway.hosting import make_runtimes
from tide_gateway.keys import KeyStore
from tide_gateway.log_lines import replica_name
from tide_gateway.loop_lag import watch_lag
from tide_gateway.metrics import Metrics
from tide_gateway.private import data_folder, make_private_file
from tide_gateway.repository import Repository
from tide_gateway.repository.retention import RetentionRows
from tide_gateway.runtimes.measured import MeasuredRuntime
from tide_gateway.serve_options import ServeOptions, check_options
from tide_gateway.service.retention import DAY_S, Retention
from tide_gateway.service.tasks import TaskService
from tide_gateway.settings import GatewaySettings, SettingsError, check_bind, check_tls, is_loopback
from tide_gateway.timekeeping import DatabaseTime
from tide_sdk import codec
from tide_sdk.collector import spare_collections
from tide_sdk.migrations import migrate
from tide_sdk.serve import raise_file_limit

OPEN_CANCEL_S = 20.0
SYNC_S = 5.0
# Longer than any client keeps an idle connection, so that it is the client that closes it.
KEEP_ALIVE_S = 75

log = logging.getLogger(__name__)


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
    check_options(options)
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
    blobs = BlobStore(data / "blobs", durable=database.durable)
    repository = Repository(database, blobs)
    deployment, seen_s = await repository.replicas.deployment()
    time = DatabaseTime()
    await time.sync(database)
    time.not_before(seen_s)
    left = {row.runtime for row in await repository.instances.all()}
    metrics = Metrics(settings.environments)
    made = await make_runtimes(settings, deployment, data, options.outlive_s, left)
    runtimes = {kind: MeasuredRuntime(runtime, metrics) for kind, runtime in made.items()}
    service = TaskService(settings.environments, runtimes, repository, time, metrics=metrics)
    replica_name.set(service.replica)
    owners = Owners(settings.tokens, KeyStore(database), allow_anonymous=is_loopback(options.host))
    server = _make_server(GatewayApp(service, owners, data / "logs"), options, listener)

    # A second signal changes nothing: the stop is bounded.
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    beside = [
        asyncio.create_task(_keep_time(time, database), name="tide-time"),
        asyncio.create_task(watch_lag(metrics.lag.of().observe), name="tide-lag"),
    ]
    stopping = asyncio.create_task(stop.wait(), name="tide-signals")
    retention = Retention(
        *(RetentionRows(database), repository.instances, blobs, data / "logs", time, options.retention_days * DAY_S),
        forget=service.forget,
    )
    try:
        if await _opens(service, stopping):
            spare_collections()
            if options.retention_days:
                beside.append(asyncio.create_task(retention.run(service.members), name="tide-retention"))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # HTTP goes on while the service stops, so that every waiting call is answered.
            await service.stop(options.drain_s, keep=options.keep)
            server.should_exit = True
            await serving
    finally:
        for task in (*beside, stopping):
            task.cancel()
        await service.stop(drain_s=0.0, keep=options.keep)
        if options.announce is not None:
            options.announce.unlink(missing_ok=True)
        log.info("stopped")


async def _opens(service: TaskService, stopping: asyncio.Task[bool]) -> bool:
    """Open the service; False where a signal came first, and what it has begun is broken off, within bounded time."""
    log.info("opening")
    opening = asyncio.create_task(service.open(), name="tide-open")
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if opening.done():
        opening.result()
        return True
    log.info("told to stop before the first request")
    opening.cancel()
    await asyncio.wait({opening}, timeout=OPEN_CANCEL_S)
    return False


async def _keep_time(time: DatabaseTime, database: Database) -> None:
    """Correct the time by the database's clock, for ever."""
    while True:
        await asyncio.sleep(SYNC_S)
        try:
            await time.sync(database)
        except StorageFailed as error:
            log.warning("the database's time could not be read: %s", error)


def _make_server(app: GatewayApp, options: ServeOptions, listener: socket.socket) -> _Server:
    tls = None
    if options.tls_cert is not None and options.tls_key is not None:
        tls = tls_context(options.tls_cert, options.tls_key)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=options.log_level,
        access_log=False,
        lifespan="off",
        http=cast("Any", guarded_protocol(ConnectionLimits(), tls)),
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
