"""Makes the runtimes that the registered environments need; the libraries of the others are never imported."""

from __future__ import annotations

from pathlib import Path

from tide_gateway.runtimes import Runtime
from tide_gateway.settings import GatewaySettings


def make_runtimes(settings: GatewaySettings, deployment: str, data: Path, outlive_s: float) -> dict[str, Runtime]:
    """The runtimes by name. `process` is always among them: it costs nothing, and finds what an earlier gateway left.

    Args:
        settings: the environments, and the variables that servers may inherit.
        deployment: what all that is made is labelled with.
        data: folder of the servers' logs.
        outlive_s: seconds that server processes outlive a killed gateway.
    """
    from tide_gateway.runtimes.process import ProcessRuntime

    environ, logs = settings.process_environment, data / "logs"
    runtimes: dict[str, Runtime] = {"process": ProcessRuntime(environ, logs, deployment, None, outlive_s)}
    for kind in {spec.runtime for spec in settings.environments.values()} - runtimes.keys():
        if kind == "fake":
            from tide_gateway.runtimes.fake import FakeRuntime

            runtimes[kind] = FakeRuntime()
    return runtimes
