"""The engines of one deployment: opened when first named, chosen by slot, surveyed together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from tide_gateway.runtimes import LaunchFailed, RuntimeAway
from tide_gateway.runtimes.docker_container import DEPLOYMENT, INSTANCE
from tide_gateway.runtimes.docker_engines import Engine
from tide_gateway.runtimes.docker_images import Images
from tide_gateway.runtimes.docker_sdk import EngineRefused, EngineUnreachable
from tide_gateway.runtimes.docker_watch import Watches
from tide_gateway.specs import DockerOptions, EnvironmentSpec

LOCAL_URL = "unix:///var/run/docker.sock"

log = logging.getLogger(__name__)


class Engines:
    """All engines that a runtime knows.

    Args:
        deployment: whose containers they are asked for.
        environ: for DOCKER_HOST, the engine of environments that name none, and DOCKER_TLS_VERIFY, DOCKER_CERT_PATH.
        watches: told of deaths.
        specs: the environments whose engines are known from the start.
    """

    def __init__(
        self, deployment: str, environ: Mapping[str, str], watches: Watches, specs: Iterable[EnvironmentSpec]
    ) -> None:
        self._deployment = deployment
        self._environ = dict(environ)
        self._watches = watches
        self._images = Images()
        self._engines: dict[str, Engine] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._urls = {url for spec in specs if spec.docker is not None for url in self._urls_of(spec.docker)}

    def known(self, spec: EnvironmentSpec | None) -> list[Engine]:
        """All engines that a container can be on, those of `spec` included."""
        if spec is not None and spec.docker is not None:
            self._urls.update(self._urls_of(spec.docker))
        return [self.get(url) for url in sorted(self._urls | self._engines.keys())]

    def get(self, url: str) -> Engine:
        """The engine of that URL."""
        engine = self._engines.get(url)
        if engine is None:
            engine = Engine(url, self._environ, self._deployment, self._on_connected, self._on_event)
            self._engines[url] = engine
        return engine

    async def choose(self, slot: int, options: DockerOptions) -> Engine:
        """A healthy engine that has the image. Nothing of the instance exists yet.

        Raises:
            LaunchFailed: no engine is healthy, or the image does not do.
        """
        engines = [self.get(url) for url in self._urls_of(options)]
        for _ in engines:
            await asyncio.gather(*(engine.ready() for engine in engines), return_exceptions=True)
            healthy = [engine for engine in engines if engine.healthy]
            if not healthy:
                break
            engine = healthy[slot % len(healthy)]
            try:
                await self._images.ensure(engine, options)
                return engine
            except EngineUnreachable as error:
                log.warning("a start goes to another engine: %s", error)
        reasons = "; ".join(f"{engine.url}: {engine.why or 'gave no answer'}" for engine in engines)
        raise LaunchFailed(f"no Docker engine is up ({reasons})")

    async def survey(self) -> set[str]:
        """The instances with a container on any engine that answers; the others are logged.

        Raises:
            RuntimeAway: none answers.
        """
        found = await asyncio.gather(*(self._survey_one(engine) for engine in self.known(None)))
        answered = [names for names in found if names is not None]
        if found and not answered:
            raise RuntimeAway("no Docker engine answers")
        return set[str]().union(*answered)

    async def close(self) -> None:
        """Stop pulls and threads. Safe to repeat."""
        await self._images.close()
        for task in self._tasks:
            task.cancel()
        engines = list(self._engines.values())
        self._engines.clear()
        await asyncio.gather(*(engine.close() for engine in engines))

    def _urls_of(self, options: DockerOptions) -> tuple[str, ...]:
        return options.engines or (self._environ.get("DOCKER_HOST") or LOCAL_URL,)

    async def _survey_one(self, engine: Engine) -> set[str] | None:
        try:
            await engine.ready()
            listed = await self._list(engine)
        except (EngineRefused, OSError) as error:
            log.warning("a survey leaves out an engine: %s", error)
            return None
        return {container["Labels"].get(INSTANCE, "") for container in listed} - {""}

    async def _list(self, engine: Engine) -> list[dict[str, Any]]:
        return await engine.call("containers", all=True, filters={"label": f"{DEPLOYMENT}={self._deployment}"})

    def _on_event(self, _engine: Engine, event: dict[str, Any]) -> None:
        self._watches.on_event(event)

    def _on_connected(self, engine: Engine) -> None:
        task = asyncio.create_task(self._compare(engine), name="tide-docker-compare")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self, engine: Engine) -> None:
        watched = self._watches.ids(engine.url)
        if not watched:
            return
        try:
            self._watches.compare(watched, await self._list(engine))
        except (EngineRefused, OSError) as error:
            log.warning("engine %s does not list its containers: %s", engine.url, error)  # the next connection does
