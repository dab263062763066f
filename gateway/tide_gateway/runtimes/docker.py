"""Environment servers as containers of one or several Docker engines.

    slot -> healthy engine -> image -> folder, network or port -> create -> start -> GET /health -> Server
    engine's events -> the container's watch -> Server.exited

The engine keeps the truth: a container's name follows from the deployment's and the instance's, its labels say whose
it is, and every gateway process of the deployment can find, freeze and remove what another one made.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tide_gateway.runtimes import Gone, LaunchFailed, Place, Server
from tide_gateway.runtimes.docker_container import (
    DEPLOYMENT,
    INSTANCE,
    State,
    Way,
    container_config,
    container_name,
    own_address,
    published_port,
)
from tide_gateway.runtimes.docker_engines import SLOW_S, Engine
from tide_gateway.runtimes.docker_pool import Engines
from tide_gateway.runtimes.docker_removal import bury, inspect, remove, until_dead
from tide_gateway.runtimes.docker_sdk import EngineRefused, EngineUnreachable, require_sdk
from tide_gateway.runtimes.docker_watch import Obituary, Watch, Watches
from tide_gateway.runtimes.docker_ways import Ways, url_host
from tide_gateway.runtimes.health import until_healthy
from tide_gateway.specs import DockerOptions, EnvironmentSpec
from tide_sdk.http import LeanClient

REMOVE_S = 60.0
"""Seconds beyond the grace that destroying may take; what is left then is found by a survey."""
_MAX_CREATES = 3
_CREATE_PAUSE_S = 0.3

log = logging.getLogger(__name__)


class DockerRuntime:
    """Starts environment servers as containers; see `Runtime` for what all runtimes promise.

    Args:
        deployment: short name that all gateway processes of one database share, and no other deployment of the engine.
        log_dir: folder for the logs of containers that died.
        run_dir: private folder for sockets, the same for all gateway processes of this machine, under the same path
            for the engine; at most 75 bytes long.
        environ: for DOCKER_HOST, DOCKER_TLS_VERIFY and DOCKER_CERT_PATH.
        specs: the registered environments: a survey asks the engines that they name before the first launch, too.

    Raises:
        SdkMissing: the `docker` library is not installed.
        ValueError: the deployment's name or `run_dir` does not do.
    """

    def __init__(
        self,
        deployment: str,
        log_dir: Path,
        run_dir: Path,
        environ: Mapping[str, str],
        specs: Iterable[EnvironmentSpec] = (),
    ) -> None:
        require_sdk()
        if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", deployment) is None:
            raise ValueError(f"deployment: {deployment!r} must be 1 to 32 of a-z, 0-9, dash and underscore")
        self._deployment = deployment
        self._log_dir = log_dir
        self._watches = Watches()
        self._engines = Engines(deployment, environ, self._watches, specs)
        self._ways = Ways(deployment, run_dir)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def launch(self, name: str, slot: int, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """Start a container and wait until its server is healthy; see `Runtime.launch`."""
        options = _options(spec)
        engine = None
        try:
            async with asyncio.timeout(timeout_s):
                engine = await self._engines.choose(slot, options)
                return await self._bring_up(engine, name, spec, options)
        except BaseException as error:
            left = await self._clear(engine, name) if engine is not None else Obituary()
            if isinstance(error, TimeoutError):
                words = left.exit_words or f"the container was not healthy within {timeout_s:g} s"
                blocked = f"; {left.blocked}" if left.blocked else ""
                raise LaunchFailed(f"{words}{blocked}{left.last_words}") from None
            if isinstance(error, (LaunchFailed, EngineRefused, OSError)):
                raise LaunchFailed(f"{left.exit_words or error}{left.last_words}") from error
            raise

    async def attach(self, name: str, spec: EnvironmentSpec, place: Place, timeout_s: float) -> Server:
        """Find a container that another process launched, thawed where it was frozen; see `Runtime.attach`."""
        if not place.host or not place.handle:
            raise Gone(f"instance {name} was not launched on an engine")
        engine = self._engines.get(place.host)
        try:
            async with asyncio.timeout(timeout_s):
                state = await self._state_to_attach(engine, name, place)
                watch = self._watches.add(place.handle, name, engine.url)
                if state is not None and state.is_frozen:
                    await engine.call("unpause", place.handle)
                return await self._connect(engine, name, place, watch)
        except TimeoutError:
            raise Gone(f"instance {name} is not healthy within {timeout_s:g} s") from None
        except (LaunchFailed, EngineRefused, EngineUnreachable) as error:
            raise Gone(f"instance {name} cannot be attached to: {error}") from error

    async def destroy(self, name: str, spec: EnvironmentSpec | None, place: Place | None, grace_s: float) -> None:
        """Stop and remove the instance's container; see `Runtime.destroy`. An engine that does not answer in time is
        logged and left: a survey names what it still has."""
        known = self._engines.known(spec)
        engines = [self._engines.get(place.host)] if place is not None and place.host else known
        done = await asyncio.gather(*(self._destroy_on(engine, name, grace_s) for engine in engines))
        if all(done):
            await asyncio.to_thread(self._ways.remove, name)
        await self._watches.drop(name)

    async def survey(self) -> set[str]:
        """The instances with a container on any engine that answers. A name that is missing is no proof of its end
        while an engine is down: those are logged.

        Raises:
            RuntimeAway: no engine answers.
        """
        return await self._engines.survey()

    async def freeze(self, server: Server, frozen: bool) -> None:
        """Freeze or thaw the container; see `Runtime.freeze`.

        Raises:
            EngineUnreachable: an OSError; the engine did not answer, and the container may be frozen or not.
        """
        engine = self._engines.get(server.place.host)
        try:
            await engine.call("pause" if frozen else "unpause", server.place.handle)
        except EngineRefused as error:
            found = await inspect(engine, server.place.handle)
            state = None if found is None else State.of(found)
            if state is None or not state.is_alive:
                raise Gone(f"instance {server.name} has no running container any more") from error
            if state.is_frozen != frozen:
                raise EngineUnreachable(f"engine {engine.url} does not freeze {server.name}: {error}") from error

    async def close(self) -> None:
        """Stop the threads, pulls and channels of this process; containers live on. Safe to repeat."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=REMOVE_S)
        await self._watches.close()
        await self._ways.close()
        await self._engines.close()

    async def _bring_up(self, engine: Engine, name: str, spec: EnvironmentSpec, options: DockerOptions) -> Server:
        way = await self._ways.make(engine, name, options)
        config = container_config(self._deployment, name, spec, options, way)
        container_id = await self._create(engine, name, config, options)
        watch = self._watches.add(container_id, name, engine.url)
        await engine.call("start", container_id, limit_s=SLOW_S)
        place = Place(await self._url(engine, name, container_id, options, way), host=engine.url, handle=container_id)
        server = await self._connect(engine, name, place, watch)
        if not way.folder:
            return server
        await asyncio.to_thread(self._ways.seal, name)
        # What answered may have been behind a link; what answers now is the socket that stays.
        await server.channel.aclose()
        watch.channels.remove(server.channel)
        return await self._connect(engine, name, place, watch)

    async def _create(self, engine: Engine, name: str, config: dict[str, Any], options: DockerOptions) -> str:
        called = container_name(self._deployment, name)
        for number in range(1, _MAX_CREATES + 1):
            try:
                made = await engine.call(
                    "create_container_from_config", config, called, options.platform or None, limit_s=SLOW_S
                )
                return made["Id"]
            except EngineRefused as error:
                if number == _MAX_CREATES or (error.status != 409 and error.status < 500):
                    raise
                if error.status == 409:  # left by a process that died, or by an answer that was lost
                    await remove(engine, called)
                else:
                    log.warning("engine %s creates no container for %s, trying again: %s", engine.url, name, error)
            await asyncio.sleep(_CREATE_PAUSE_S)
        raise AssertionError("unreachable")

    async def _url(self, engine: Engine, name: str, container_id: str, options: DockerOptions, way: Way) -> str:
        if way.folder:
            return f"unix:{self._ways.socket(name)}"
        if way.network == "host":
            return f"http://{_bracketed(url_host(engine, options))}:{way.port}"
        inspected = await inspect(engine, container_id)
        if inspected is None or not State.of(inspected).is_alive:
            raise LaunchFailed("the container exited before it was ready")
        if way.publish:
            return f"http://{_bracketed(options.address)}:{published_port(inspected, way.port)}"
        return f"http://{_bracketed(own_address(inspected))}:{way.port}"

    async def _connect(self, engine: Engine, name: str, place: Place, watch: Watch) -> Server:
        """A server for a container that runs, once it is healthy; the caller sets the deadline.

        Raises:
            LaunchFailed: the container ended before.
        """
        channel = LeanClient(place.url, max_in_flight=4096, timeout_s=30.0)
        asking = asyncio.create_task(until_healthy(channel), name=f"tide-health-{name}")
        dying = asyncio.create_task(until_dead(engine, place.handle, watch), name=f"tide-dying-{name}")
        try:
            await asyncio.wait({asking, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                dying.result()
                raise LaunchFailed("the container exited before it was ready")
            health = asking.result()
        except BaseException:
            await channel.aclose()
            raise
        finally:
            asking.cancel()
            dying.cancel()
            await asyncio.gather(asking, dying, return_exceptions=True)
        watch.channels.append(channel)
        return Server(name=name, channel=channel, health=health, place=place, exited=watch.exited)

    async def _state_to_attach(self, engine: Engine, name: str, place: Place) -> State | None:
        """The state of the container that is to be attached to; None while its engine is away, since it may live on.

        Raises:
            Gone: the engine has no such container, or it does not run.
        """
        try:
            await engine.ready()
            found = await inspect(engine, place.handle)
        except EngineUnreachable as error:
            log.warning("attaching to %s without its engine: %s", name, error)
            return None
        labels = {} if found is None else found["Config"].get("Labels") or {}
        if found is None or (labels.get(DEPLOYMENT), labels.get(INSTANCE)) != (self._deployment, name):
            raise Gone(f"instance {name} has no container on the engine {engine.url}")
        state = State.of(found)
        if not state.is_alive:
            raise Gone(f"instance {name}: {Obituary(state).exit_words or 'its container does not run'}")
        return state

    async def _clear(self, engine: Engine, name: str) -> Obituary:
        """Remove what a launch made. Goes on in the background where the caller is cancelled once more."""
        clearing = asyncio.create_task(self._clear_now(engine, name), name=f"tide-clear-{name}")
        self._tasks.add(clearing)
        clearing.add_done_callback(self._tasks.discard)
        return await asyncio.shield(clearing)

    async def _clear_now(self, engine: Engine, name: str) -> Obituary:
        obituary = Obituary(blocked=self._ways.blocked(name))
        for watch in self._watches.named(name):
            watch.expected = True
        try:
            async with asyncio.timeout(REMOVE_S):
                called = container_name(self._deployment, name)
                left = await bury(engine, called, self._log_path(name), self._watches, 0.0, failed=True)
                obituary = replace(left, blocked=obituary.blocked)
        except (EngineRefused, OSError) as error:
            log.warning("a container of instance %s may be left until the next survey: %s", name, error)
        await asyncio.to_thread(self._ways.remove, name)
        await self._watches.drop(name)
        return obituary

    async def _destroy_on(self, engine: Engine, name: str, grace_s: float) -> bool:
        called = container_name(self._deployment, name)
        try:
            async with asyncio.timeout(grace_s + REMOVE_S):
                await engine.ready()
                await bury(engine, called, self._log_path(name), self._watches, grace_s)
                return True
        except (EngineRefused, OSError) as error:
            log.warning("a container of instance %s may be left until the next survey: %s", name, error)
            return False

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.log"


def _options(spec: EnvironmentSpec) -> DockerOptions:
    if spec.docker is None:
        raise LaunchFailed(f"environment {spec.name!r} has no table [environments.{spec.name}.docker]")
    return spec.docker


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
