"""Asks Docker engines, once and without changing anything, whether environments could run there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_gateway.runtimes.docker_container import DEPLOYMENT, INSTANCE
from tide_gateway.runtimes.docker_images import fits, platform_in
from tide_gateway.runtimes.docker_pool import LOCAL_URL
from tide_gateway.runtimes.docker_sdk import EngineRefused, in_thread, open_client, require_sdk, translated
from tide_gateway.specs import DockerOptions

ASK_S = 10.0
LIMITS: Mapping[str, str] = {"MemoryLimit": "memory_mb", "CpuCfsQuota": "cpus", "PidsLimit": "pids"}
"""What an engine says of itself -> the option that needs it."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of itself.

    Attributes:
        platform: what it runs, for example `linux/amd64`.
        cgroup: the version of the control groups, "" where it does not say.
        without: options whose limits it cannot set.
        runtimes: names of its OCI runtimes.
        instances: servers of the deployment that have a container there.
    """

    version: str
    platform: str
    cgroup: str
    without: tuple[str, ...]
    runtimes: frozenset[str]
    instances: frozenset[str]


def urls_of(options: DockerOptions, environ: Mapping[str, str]) -> Sequence[str]:
    """The engines of an environment."""
    return options.engines or (environ.get("DOCKER_HOST") or LOCAL_URL,)


async def ask_engine(url: str, environ: Mapping[str, str], deployment: str) -> EngineFacts:
    """What an engine says of itself.

    Raises:
        SdkMissing, EngineRefused, EngineUnreachable, TimeoutError: it does not.
    """

    def ask(client: Any) -> EngineFacts:
        version, info = client.version(api_version=False), client.info()
        filters = {"label": f"{DEPLOYMENT}={deployment}"}
        listed = client.containers(all=True, filters=filters) if deployment else []
        return EngineFacts(
            version=str(version.get("Version", "")),
            platform=f"{version.get('Os', 'linux')}/{version.get('Arch', '')}",
            cgroup=str(info.get("CgroupVersion", "")),
            without=tuple(option for name, option in LIMITS.items() if info.get(name) is False),
            runtimes=frozenset(info.get("Runtimes") or {}),
            instances=frozenset(each["Labels"].get(INSTANCE, "") for each in listed) - {""},
        )

    return await _ask(url, environ, ask)


async def image_problem(url: str, environ: Mapping[str, str], options: DockerOptions, platform: str) -> tuple[str, str]:
    """What keeps a server of the image from being launched, and a note where it is pulled first; "" for neither.

    Raises:
        EngineRefused, EngineUnreachable, TimeoutError: the engine does not say.
    """
    wanted = options.platform or platform

    def ask(client: Any) -> tuple[str, str]:
        inspected = _unless_missing(lambda: client.inspect_image(options.image))
        if inspected is not None and options.pull != "always":
            found = platform_in(inspected)
            if fits(found, wanted):
                return "", ""
            return f"image {options.image!r} is built for {found}, and the engine wants {wanted}", ""
        if options.pull == "never":
            return f'image {options.image!r} is not there, and pull = "never"', ""
        try:
            # Its registry is asked, and nothing is pulled.
            told = translated(lambda _: client.inspect_distribution(options.image), lambda: None)
        except (EngineRefused, OSError) as error:
            return f"image {options.image!r} is not there and cannot be pulled: {error}", ""
        offers = [f"{each.get('os')}/{each.get('architecture')}" for each in told.get("Platforms") or ()]
        if offers and not any(fits(offer, wanted) for offer in offers):
            return f"image {options.image!r} is offered for {', '.join(offers)}, and the engine wants {wanted}", ""
        return "", f"image {options.image!r} is pulled at the first launch"

    return await _ask(url, environ, ask)


async def has_network(url: str, environ: Mapping[str, str], name: str) -> bool:
    """Whether the engine has a network of that name.

    Raises:
        EngineRefused, EngineUnreachable, TimeoutError: the engine does not say.
    """
    found = await _ask(url, environ, lambda client: _unless_missing(lambda: client.inspect_network(name)))
    return found is not None


def can_freeze(cgroup: str) -> bool:
    """Whether the kernel of this machine stops the processes of a container; for an engine of this machine."""
    if cgroup == "2":
        return any(Path("/sys/fs/cgroup").glob("*/cgroup.freeze"))
    for line in Path("/proc/cgroups").read_text().splitlines():
        name, *_, enabled = line.split()
        if name == "freezer":
            return enabled == "1"
    return False


async def _ask(url: str, environ: Mapping[str, str], function: Callable[[Any], Any]) -> Any:
    require_sdk()

    def run() -> Any:
        clients: list[Any] = []

        def connect() -> Any:
            clients.append(open_client(url, environ, ASK_S, 1))
            return clients[0]

        try:
            return translated(function, connect)
        finally:
            for client in clients:
                client.close()

    return await in_thread(run, ASK_S)


def _unless_missing(call: Callable[[], Any]) -> Any:
    try:
        return translated(lambda _: call(), lambda: None)
    except EngineRefused as error:
        if error.status == 404:
            return None
        raise
