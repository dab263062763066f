"""Makes the runtimes that the registered environments need; the libraries of the others are never imported."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from tide_gateway.runtimes import Runtime
from tide_gateway.settings import GatewaySettings, SettingsError

log = logging.getLogger(__name__)


async def make_runtimes(
    settings: GatewaySettings, deployment: str, data: Path, outlive_s: float, left: Collection[str] = ()
) -> dict[str, Runtime]:
    """The runtimes by name. `process` is always among them: it costs nothing, and finds what an earlier gateway left.

    Args:
        settings: the environments, and the variables that servers may inherit.
        deployment: what all that is made is labelled with.
        data: folder of the servers' logs.
        outlive_s: seconds that server processes outlive a killed gateway.
        left: runtimes of servers that are stored, whose environments may be registered no more: they are still to be
            removed.

    Raises:
        SettingsError: what a runtime needs of this machine is missing.
    """
    from tide_gateway.runtimes.process import ProcessRuntime

    environ, logs = settings.process_environment, data / "logs"
    needed = {spec.runtime for spec in settings.environments.values()}
    kinds = needed.union(left)
    process = ProcessRuntime(environ, logs, deployment, None, outlive_s)
    runtimes: dict[str, Runtime] = {"process": process}
    if "process" in needed:
        try:
            await process.open()
        except OSError as error:
            raise SettingsError(f"the folder of sockets cannot be used: {error}") from error
    specs = settings.environments.values()
    if "docker" in kinds:
        from tide_gateway.runtimes.docker import DockerRuntime
        from tide_gateway.runtimes.docker_sdk import SdkMissing
        from tide_gateway.runtimes.process_places import default_run_dir

        try:
            runtimes["docker"] = DockerRuntime(deployment, logs, default_run_dir(deployment), environ, specs)
        except (SdkMissing, ValueError) as error:
            if "docker" in needed:
                raise SettingsError(f"runtime docker: {error}") from error
            log.warning("containers that an earlier gateway left cannot be removed: %s", error)
    if "remote" in kinds:
        from tide_gateway.runtimes.remote import RemoteRuntime

        runtimes["remote"] = RemoteRuntime(specs)
    if "ray" in kinds:
        from tide_gateway.runtimes.ray_runtime import RayRuntime

        addresses = {spec.ray.address if spec.ray else "" for spec in specs if spec.runtime == "ray"}
        runtimes["ray"] = RayRuntime(deployment, logs, environ, sorted(addresses))
    if "fake" in kinds:
        from tide_gateway.runtimes.fake import FakeRuntime

        runtimes["fake"] = FakeRuntime()
    return runtimes
