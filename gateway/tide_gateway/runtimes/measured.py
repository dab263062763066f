"""A runtime that counts: how long launches and calls to its servers take, and how many launches fail."""

from __future__ import annotations

from functools import partial
from time import perf_counter

from tide_gateway.metrics import Metrics
from tide_gateway.runtimes import LaunchFailed, Place, Runtime, Server
from tide_gateway.specs import EnvironmentSpec

_CALLS = {"/start": "start", "/observation": "turn", "/pause": "pause", "/resume": "resume", "/end": "end"}
"""The paths that are measured, by the names that they have in the metrics."""


class MeasuredRuntime:
    """Does what another runtime does.

    Args:
        runtime: that one.
        metrics: takes what is counted.
    """

    def __init__(self, runtime: Runtime, metrics: Metrics) -> None:
        self._runtime = runtime
        self._metrics = metrics

    async def launch(self, name: str, slot: int, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """See `Runtime.launch`."""
        begun_s = perf_counter()
        try:
            server = await self._runtime.launch(name, slot, spec, timeout_s)
        except LaunchFailed:
            self._metrics.launch_failures.add(spec.name)
            raise
        self._metrics.launches.of(spec.name).observe(perf_counter() - begun_s)
        return self._measured(server, spec)

    async def attach(self, name: str, spec: EnvironmentSpec, place: Place, timeout_s: float) -> Server:
        """See `Runtime.attach`."""
        return self._measured(await self._runtime.attach(name, spec, place, timeout_s), spec)

    async def destroy(self, name: str, spec: EnvironmentSpec | None, place: Place | None, grace_s: float) -> None:
        """See `Runtime.destroy`."""
        await self._runtime.destroy(name, spec, place, grace_s)

    async def survey(self) -> set[str]:
        """See `Runtime.survey`."""
        return await self._runtime.survey()

    async def freeze(self, server: Server, frozen: bool) -> None:
        """See `Runtime.freeze`."""
        await self._runtime.freeze(server, frozen)

    async def close(self) -> None:
        """See `Runtime.close`."""
        await self._runtime.close()

    def _measured(self, server: Server, spec: EnvironmentSpec) -> Server:
        server.took = partial(self._count, spec.name)
        return server

    def _count(self, environment: str, path: str, seconds: float) -> None:
        self._metrics.environment_calls.of(_CALLS[path], environment).observe(seconds)
