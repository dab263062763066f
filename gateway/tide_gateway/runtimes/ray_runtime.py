"""Environment servers spread over a Ray cluster: one detached actor for each, which owns the server's process.

    launch -> driver process -> actor on some node -> server on the node's address -> GET /health, called directly

Only the life of a server goes through Ray; its calls go from the gateway straight to the node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tide_gateway.runtimes import Gone, LaunchFailed, Place, RuntimeAway, Server
from tide_gateway.runtimes.health import until_healthy
from tide_gateway.runtimes.ray_link import ClusterAway, RayLink, Refused, last_line
from tide_gateway.specs import EnvironmentSpec, RayOptions
from tide_sdk import codec
from tide_sdk.http import LeanClient

_MAX_IN_FLIGHT = 4096
_CALL_S = 30.0
_AGAIN_S = 1.0
_CLEAN_S = 20.0
_SURVEY_S = 30.0

log = logging.getLogger(__name__)


class RayRuntime:
    """Starts environment servers on the clusters of `[environments.NAME.ray]`.

    Args:
        deployment: names this gateway's actors, `tide-DEPLOYMENT-INSTANCE` in the namespace `tide-DEPLOYMENT`; all
            replicas have the same.
        log_dir: folder of the drivers' logs, and of what servers that ended by themselves wrote last.
        environ: variables of the driver processes; RAY_ADDRESS is the cluster of environments that name none.
        addresses: the registered environments' `ray.address`, so that a survey knows clusters before the first launch.
    """

    def __init__(
        self, deployment: str, log_dir: Path, environ: Mapping[str, str], addresses: Iterable[str] = ()
    ) -> None:
        self._namespace = f"tide-{deployment}"
        self._log_dir = log_dir
        self._environ = dict(environ)
        self._links: dict[str, RayLink] = {}
        self._exits: dict[str, asyncio.Event] = {}
        self._reasons: dict[str, str] = {}
        self._channels: dict[str, list[LeanClient]] = {}
        for address in addresses:
            self._link(address)

    async def launch(self, name: str, slot: int, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """Start a server on some node and wait until it is healthy; see `Runtime.launch`."""
        options = spec.ray or RayOptions()
        link = self._link(options.address)
        until_s = asyncio.get_running_loop().time() + timeout_s
        self._exits[name] = asyncio.Event()
        try:
            found = await link.call("launch", timeout_s, **_request(name, spec, options))
            async with asyncio.timeout_at(until_s):
                return await self._open(name, link, found)
        except BaseException as error:
            words = ""
            # Not where the launch itself was refused: the driver has cleaned up, or there is no cluster.
            if not isinstance(error, Refused) and link.running:
                words = await asyncio.shield(self._clean(name, link))
            self._forget(name)
            told = f"the environment server was not healthy within {timeout_s:g} s{last_line(words)}"
            if isinstance(error, Refused | Gone | ClusterAway | LaunchFailed):
                told = str(error)
            elif not isinstance(error, TimeoutError):
                raise
            raise LaunchFailed(told) from None

    async def attach(self, name: str, spec: EnvironmentSpec, place: Place, timeout_s: float) -> Server:
        """Find the actor by its name, and call its server; see `Runtime.attach`."""
        link = self._link(_handle(place).get("address", ""))
        until_s = asyncio.get_running_loop().time() + timeout_s
        known = name in self._exits
        self._exits.setdefault(name, asyncio.Event())
        try:
            found = await _find(link, name, until_s)
            if found["url"] != place.url:
                raise Gone(f"instance {name} is at {found['url']}, not at {place.url}")
            async with asyncio.timeout_at(until_s):
                return await self._open(name, link, found)
        except BaseException as error:
            if not known:
                link.forget(name)
                self._forget(name)
            if isinstance(error, Refused | ClusterAway | LaunchFailed):
                raise Gone(str(error)) from None
            if isinstance(error, TimeoutError):
                raise Gone(f"instance {name} was not healthy within {timeout_s:g} s") from None
            raise

    async def destroy(self, name: str, spec: EnvironmentSpec | None, place: Place | None, grace_s: float) -> None:
        """Stop the server and kill its actor; see `Runtime.destroy`. A cluster that does not answer is logged and left:
        a survey names what it still has."""
        if place is not None:
            handle = _handle(place)
            links = [self._link(handle.get("address", ""))]
        else:
            handle = {}
            links = [self._link((spec.ray or RayOptions()).address)] if spec is not None else list(self._links.values())
        for link in links:
            link.forget(name)
        where = {"node": handle.get("node", ""), "actor": handle.get("actor", [0, ""])}
        calls = (link.call("destroy", grace_s + _CLEAN_S, name=name, grace_s=grace_s, **where) for link in links)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, ClusterAway | Refused):
                log.warning("instance %s may not be destroyed: %s", name, result)
            elif isinstance(result, BaseException):
                raise result
        exited = self._exits.get(name)
        if exited is not None:
            exited.set()
        for channel in self._channels.get(name, ()):
            await channel.aclose()
        self._forget(name)

    async def survey(self) -> set[str]:
        """The instances with an actor on any cluster that answers. A name that is missing is no proof of its end while
        a cluster is away: that is logged. A local cluster is not started for it.

        Raises:
            RuntimeAway: no cluster answers.
        """
        links = [link for link in self._links.values() if link.address or link.running]
        found: set[str] = set()
        num_away = 0
        for result in await asyncio.gather(*(link.call("survey", _SURVEY_S) for link in links), return_exceptions=True):
            if isinstance(result, ClusterAway | Refused):
                log.warning("no survey: %s", result)
                num_away += 1
            elif isinstance(result, BaseException):
                raise result
            else:
                found.update(result)
        if links and num_away == len(links):
            raise RuntimeAway("no Ray cluster answers")
        return found

    async def freeze(self, server: Server, frozen: bool) -> NoReturn:
        """Not possible; an environment that asks for it is refused when its table is read."""
        raise NotImplementedError("the ray runtime cannot freeze a server")

    async def close(self) -> None:
        """End the drivers and close the connections; see `Runtime.close`. A local cluster that a driver started ends
        with it, and so do its servers."""
        await asyncio.gather(*(link.close() for link in self._links.values()))
        for channel in [channel for opened in self._channels.values() for channel in opened]:
            await channel.aclose()
        self._channels.clear()

    def _link(self, address: str) -> RayLink:
        address = address or self._environ.get("RAY_ADDRESS", "")
        if address not in self._links:
            log_path = self._log_dir / f"ray-driver-{len(self._links)}.log"
            self._links[address] = RayLink(address, self._namespace, self._environ, log_path, self._ended)
        return self._links[address]

    async def _open(self, name: str, link: RayLink, found: Mapping[str, Any]) -> Server:
        exited = self._exits[name]

        def check() -> None:
            if exited.is_set():
                raise LaunchFailed(self._reasons.get(name, "the environment server ended"))

        try:
            channel = LeanClient(found["url"], max_in_flight=_MAX_IN_FLIGHT, timeout_s=_CALL_S)
        except ValueError:
            raise LaunchFailed(f"the environment server announced {found['url'][:200]!r}, which is no URL") from None
        try:
            health = await until_healthy(channel, check)
        except BaseException:
            await channel.aclose()
            raise
        self._channels.setdefault(name, []).append(channel)
        # No pid: it is the node's, and may be somebody else's on this machine.
        handle = {"address": link.address} | {key: found[key] for key in ("node", "pid", "actor")}
        place = Place(found["url"], host=found["host"], handle=codec.dumps(handle).decode())
        return Server(name=name, channel=channel, health=health, place=place, exited=exited)

    async def _clean(self, name: str, link: RayLink) -> str:
        """Remove what a launch left; the server's last words."""
        link.forget(name)
        try:
            words = await link.call("destroy", _CLEAN_S, name=name, grace_s=0.0, node="", actor=[0, ""])
        except (ClusterAway, Refused) as error:
            log.warning("instance %s may be left on the cluster: %s", name, error)
            return ""
        self._keep(name, words)
        return words

    def _ended(self, name: str, reason: str, words: str) -> None:
        log.warning("environment server %s ended: %s", name, reason)
        self._reasons[name] = reason
        self._keep(name, words)
        exited = self._exits.get(name)
        if exited is not None:
            exited.set()

    def _keep(self, name: str, words: str) -> None:
        if words:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            (self._log_dir / f"{name}.log").write_text(words, encoding="utf-8")

    def _forget(self, name: str) -> None:
        self._exits.pop(name, None)
        self._reasons.pop(name, None)
        self._channels.pop(name, None)


def _request(name: str, spec: EnvironmentSpec, options: RayOptions) -> dict[str, Any]:
    resources: dict[str, Any] = {"num_cpus": options.num_cpus, "resources": options.resources}
    if options.memory_mb:
        resources["memory"] = options.memory_mb * 1024 * 1024
    return {
        "name": name,
        "command": list(spec.command),
        "env": spec.env,
        "capacity": spec.tasks_per_server,
        "resources": resources,
    }


async def _find(link: RayLink, name: str, until_s: float) -> dict[str, Any]:
    """Ask again while the cluster is away: a server is not gone because a question about it got lost."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await link.call("attach", until_s - loop.time(), name=name)
        except ClusterAway:
            left_s = until_s - loop.time()
            if left_s <= _AGAIN_S:
                raise
            await asyncio.sleep(_AGAIN_S)


def _handle(place: Place) -> dict[str, Any]:
    """What a place's handle says; empty for one that is not ours."""
    try:
        data = codec.loads(place.handle.encode())
    except codec.CodecError:
        return {}
    return data if isinstance(data, dict) else {}
