"""Environment servers as processes of this machine, each under a supervisor that outlives the gateway for a while.

launch: claim -> supervisor (launch.py) -> server -> healthy        a gateway's heartbeat -> run_dir/alive -> supervisor
attach: pid + start ticks + mark -> healthy                         a supervisor's end -> pidfd -> Server.exited
destroy: SIGTERM, grace, kill all of the tree; scan for the mark where the supervisor could not
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tide_gateway.host import start_ticks
from tide_gateway.runtimes import Gone, LaunchFailed, Place, Server
from tide_gateway.runtimes.health import ask_health, until_healthy
from tide_gateway.runtimes.process_marks import (
    MARK,
    Marks,
    host_name,
    listens,
    same_host,
    signal_tree,
)
from tide_gateway.runtimes.process_places import (
    FolderRefused,
    Places,
    RunFolder,
    announced_url,
    default_run_dir,
    fill,
    free_port,
    last_words,
    prune_logs,
    remove_if_empty,
    says_port_taken,
    server_environ,
)
from tide_gateway.runtimes.supervise import Life, Lives
from tide_gateway.specs import EnvironmentSpec
from tide_sdk.http import LeanClient
from tide_sdk.wire import HealthResponse

__all__ = ["MARK", "FolderRefused", "ProcessRuntime"]

_POLL_S = 0.03
_MAX_POLL_S = 0.25
_PORT_ATTEMPTS = 4
_BEAT_S = 1.0
_LAUNCHER = str(Path(__file__).with_name("launch.py"))

log = logging.getLogger(__name__)


class _PortTaken(LaunchFailed):
    """Somebody else took the port before the server did."""


class ProcessRuntime:
    """Starts environment servers as processes of this machine, and finds those of other gateways of its deployment.

    Args:
        environ: the gateway's own variables; servers get the harmless ones and those that their options name.
        log_dir: folder of the servers' log files, each cut at 64 MB; of ended servers the newest 1,000 are kept.
        deployment: the name that all replicas on one database share; other deployments' processes are left alone.
        run_dir: private folder of sockets, the same for all replicas of the deployment on this machine; None takes
            one in the system's temporary folder.
        outlive_s: seconds that servers live on when no gateway of the deployment runs on this machine, so that the
            next one finds them; 0 kills them at once with the gateway that launched them.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        log_dir: Path,
        deployment: str = "tide",
        run_dir: Path | None = None,
        outlive_s: float = 0.0,
    ) -> None:
        self.host = host_name()
        self._environ = dict(environ)
        self._log_dir = log_dir
        self._outlive_s = outlive_s
        self._folder = RunFolder(default_run_dir(deployment) if run_dir is None else run_dir, deployment)
        self._marks = Marks(deployment)
        self._lives = Lives(self._marks, self._folder)
        self._heart: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Make the run folder and begin to show that a gateway lives; whatever is called first does it too.

        Raises:
            FolderRefused: the run folder cannot be used; the message says why.
        """
        self._folder.make()
        if self._heart is None:
            self._folder.touch()
            self._heart = asyncio.create_task(self._beat(), name="tide-process-heart")

    async def launch(self, name: str, slot: int, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """Start a server and wait until it is healthy; see `Runtime.launch`."""
        log_path = self._log_dir / f"{name}.log"
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(_PORT_ATTEMPTS - 1):
                    with contextlib.suppress(_PortTaken):
                        return await self._launch_once(name, spec, log_path)
                return await self._launch_once(name, spec, log_path)
        except TimeoutError:
            words = f"the environment server was not healthy within {timeout_s:g} s{last_words(log_path)}"
            raise LaunchFailed(words) from None
        except OSError as error:
            raise LaunchFailed(f"no process can be started: {error}") from error
        except LaunchFailed as error:
            raise LaunchFailed(f"{error}{last_words(log_path)}") from None

    async def attach(self, name: str, spec: EnvironmentSpec, place: Place, timeout_s: float) -> Server:
        """Find a server that another gateway launched; see `Runtime.attach`."""
        if not same_host(place.host, self.host):
            raise Gone(f"the environment server {name} runs on {place.host or '?'}, and this is {self.host}")
        try:
            await self.open()
        except OSError as error:
            raise Gone(f"the environment server {name} cannot be reached: {error}") from error
        life = self._lives.find(name, place.pid, place.handle)
        if life is None:
            raise Gone(f"the environment server {name} (pid {place.pid}) does not run any more")

        def check() -> None:
            if life.gone.is_set():
                raise Gone(f"the environment server {name} (pid {life.pid}) ended")

        channel = _channel(place.url)
        if spec.freeze:
            signal_tree(life.pid, signal.SIGCONT)
        try:
            async with asyncio.timeout(timeout_s):
                health = await until_healthy(channel, check)
            check()
        except BaseException as error:
            await channel.aclose()
            if isinstance(error, TimeoutError):
                raise Gone(f"the environment server {name} was not healthy within {timeout_s:g} s") from None
            if isinstance(error, LaunchFailed):
                raise Gone(f"the environment server {name}: {error}") from error
            raise
        return self._hand_out(life, channel, health)

    async def destroy(self, name: str, spec: EnvironmentSpec | None, place: Place | None, grace_s: float) -> None:
        """Stop a server and all that it started; see `Runtime.destroy`. What runs on another machine is left there."""
        if place is not None and place.host and not same_host(place.host, self.host):
            log.warning("environment server %s runs on %s: a gateway there has to stop it", name, place.host)
            return
        places = self._folder.places(name)
        known = [(place.pid, place.handle)] if place is not None else []
        known += [found] if (found := places.supervisor()) is not None else []
        life = self._lives.get(name)
        for pid, ticks in known:
            life = life or self._lives.find(name, pid, ticks)
        if life is not None:
            await life.stop(grace_s)
        # The supervisor removes its file once nothing of its tree is left.
        if life is None or places.run.exists():
            await self._marks.kill(name)
        places.remove()
        remove_if_empty(self._log_dir / f"{name}.log")
        self._lives.forget(name)
        for server in life.servers if life is not None else ():
            server.exited.set()
            await server.channel.aclose()

    async def survey(self) -> set[str]:
        """The names that any process of this deployment on this machine carries; see `Runtime.survey`."""
        names = set(await self._marks.find())
        await asyncio.to_thread(prune_logs, self._log_dir, names)
        return names

    async def freeze(self, server: Server, frozen: bool) -> None:
        """Stop or continue all processes of a server, but not their supervisor; see `Runtime.freeze`."""
        life = self._lives.get(server.name)
        if life is None or life.gone.is_set():
            raise Gone(f"the environment server {server.name} does not run any more")
        signal_tree(life.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    async def close(self) -> None:
        """Show no life any more, and free what this process holds; servers live on. Safe to repeat."""
        await asyncio.gather(*self._endings, return_exceptions=True)
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
        await self._lives.close()
        self._folder.remove_if_empty()

    async def _beat(self) -> None:
        well = True
        interval_s = min(_BEAT_S, self._outlive_s / 5) if self._outlive_s else _BEAT_S
        while True:
            await asyncio.sleep(interval_s)
            try:
                self._folder.touch()
                well = True
            except OSError as error:
                if well:
                    log.error("environment servers cannot see that this gateway lives: %s", error)
                well = False

    async def _launch_once(self, name: str, spec: EnvironmentSpec, log_path: Path) -> Server:
        try:
            await self.open()
            places = self._folder.claim(name)
            port = free_port() if any("{port}" in word for word in spec.command) else 0
            life = self._spawn(name, spec, places, port, log_path)
            channel, health = await self._until_healthy(life, spec, places, port, log_path)
        except BaseException:
            ending = asyncio.create_task(self.destroy(name, spec, None, 0.0))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            await asyncio.shield(ending)
            raise
        return self._hand_out(life, channel, health)

    def _spawn(self, name: str, spec: EnvironmentSpec, places: Places, port: int, log_path: Path) -> Life:
        values = {"uds": str(places.uds), "announce": str(places.announce), "capacity": str(spec.tasks_per_server)}
        options = spec.process
        limits = (options.memory_mb * 1024 * 1024, options.max_processes, options.max_open_files)
        launcher = [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), str(self._outlive_s)]
        launcher += [str(self._folder.alive), str(places.run), *map(str, limits)]
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as out:
            # In the loop's own thread: a death signal is bound to the thread that forks.
            child = subprocess.Popen(
                launcher + fill(spec.command, values | {"port": str(port)}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=server_environ(self._environ, spec, (MARK, self._marks.mark(name))),
                start_new_session=True,
            )
        life = Life(name, child.pid, str(start_ticks(child.pid) or ""), child)
        self._lives.watch(life)
        return life

    def _hand_out(self, life: Life, channel: LeanClient, health: HealthResponse) -> Server:
        server = Server(life.name, channel, health, Place(channel.base_url, self.host, life.pid, life.ticks))
        life.servers.append(server)
        if life.gone.is_set():
            server.exited.set()
        return server

    async def _until_healthy(
        self, life: Life, spec: EnvironmentSpec, places: Places, port: int, log_path: Path
    ) -> tuple[LeanClient, HealthResponse]:
        pause_s = _POLL_S
        while not await life.gone_within(pause_s):
            url = _url_of(spec, places, port)
            if url is not None:
                try:
                    channel = _channel(url)
                except ValueError:
                    raise LaunchFailed(f"the environment server announced {url[:200]!r}, which is no URL") from None
                health = None
                try:
                    health = await ask_health(channel)
                    if health is not None and (not port or listens(life.pid, port)):
                        return channel, health
                except LaunchFailed:
                    if not port or listens(life.pid, port):
                        raise
                except BaseException:
                    await channel.aclose()
                    raise
                await channel.aclose()
            pause_s = min(_MAX_POLL_S, pause_s * 1.3)
        code = life.child.returncode if life.child is not None else None
        kind = _PortTaken if port and says_port_taken(log_path) else LaunchFailed
        raise kind(f"the environment server exited with code {code} before it was ready")


def _channel(url: str) -> LeanClient:
    return LeanClient(url, max_in_flight=4096, timeout_s=30.0)


def _url_of(spec: EnvironmentSpec, places: Places, port: int) -> str | None:
    """Where a server listens, None while it has not said so."""
    if port:
        return f"http://127.0.0.1:{port}"
    if any("{uds}" in word for word in spec.command):
        return f"unix:{places.uds}" if places.uds.exists() else None
    return announced_url(places.announce)
