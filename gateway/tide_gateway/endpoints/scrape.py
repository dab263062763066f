"""What `GET /metrics` answers: the counts of this process, and what the rows of all replicas say now.

A database or an engine that is away costs a scrape its few seconds of waiting and the figures that it would have given;
the others come.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from tide_gateway.repository import InstanceState, StorageFailed
from tide_gateway.repository.census import Census
from tide_gateway.service.readiness import Parts
from tide_gateway.service.tasks import TaskService
from tide_sdk.clocks import RUNNING, ClockName, TaskState


class Scrape:
    """Collects for one gateway.

    Args:
        service: whose figures these are.
        version: the gateway's, for `tide_gateway_build_info`.
    """

    def __init__(self, service: TaskService, version: str) -> None:
        self._service = service
        self._version = version
        self._census: Census | None = None
        self._parts = Parts(serving=True, heartbeat=True, database=True, runtimes={})
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(service.metrics)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def text(self) -> bytes:
        """All metrics in Prometheus' text format, within a few seconds."""
        census, parts = await asyncio.gather(self._counted(), self._service.readiness.parts())
        # No other scrape comes in between: there is nothing to wait for from here on.
        self._census, self._parts = census, parts
        return generate_latest(self._registry)

    async def _counted(self) -> Census | None:
        try:
            return await self._service.readiness.census.answer()
        except (StorageFailed, TimeoutError):
            return None

    def collect(self) -> Iterator[Metric]:
        """The figures that are not counted but looked up."""
        yield from self._of_process()
        yield from self._of_parts()
        yield from self._of_fleets()
        if self._census is not None:
            yield from self._of_tasks(self._census)
            yield from self._of_servers(self._census)

    def _of_process(self) -> Iterator[Metric]:
        service, build = self._service, InfoMetricFamily("tide_gateway_build", "The gateway's version and name.")
        labels = {"version": self._version, "python": platform.python_version(), "replica": service.replica}
        build.add_metric([], labels)
        yield build
        yield _gauge("tide_gateway_requests_in_flight", "HTTP requests being answered.", service.metrics.num_in_flight)
        words = "Gateways on the same database that are alive, this one included."
        yield _gauge("tide_gateway_replicas_alive", words, len(service.members.alive))
        words = "1 on the one replica that does what one is enough for."
        yield _gauge("tide_gateway_leader", words, service.members.leads)

    def _of_parts(self) -> Iterator[Metric]:
        parts = self._parts
        yield _gauge("tide_gateway_ready", "1 while /readyz answers 200.", not parts.faults)
        yield _gauge("tide_gateway_database_up", "1 while the database answers.", parts.database and bool(self._census))
        words = "1 while anything of the runtime answers: an engine, a cluster, a server."
        runtimes = GaugeMetricFamily("tide_gateway_runtime_up", words, labels=["runtime"])
        for name, up in parts.runtimes.items():
            runtimes.add_metric([name], up)
        yield runtimes

    def _of_fleets(self) -> Iterator[Metric]:
        slots = GaugeMetricFamily("tide_gateway_slots", "Tasks that may run at once.", labels=["environment"])
        words = "Environment servers that died or stopped to answer, of those that this replica kept."
        lost = CounterMetricFamily("tide_gateway_instances_lost", words, labels=["environment"])
        for name, fleet in self._service.fleets.items():
            slots.add_metric([name], fleet.capacity)
            lost.add_metric([name], fleet.num_lost)
        yield from (slots, lost)

    def _of_tasks(self, census: Census) -> Iterator[Metric]:
        tasks = GaugeMetricFamily(
            "tide_gateway_tasks", "Tasks that have not ended, of all replicas.", labels=["environment", "state"]
        )
        clocks = GaugeMetricFamily("tide_gateway_clocks_running", "Clocks that run.", labels=["environment", "clock"])
        words = "Seconds until the next clock or cap runs out; below 0 where none ended its task in time."
        left = GaugeMetricFamily("tide_gateway_next_limit_seconds", words, labels=["environment"])
        taken = GaugeMetricFamily("tide_gateway_slots_taken", "Slots that tasks hold.", labels=["environment"])
        queue = GaugeMetricFamily("tide_gateway_starts_waiting", "Starts in the queue.", labels=["environment"])
        for name in sorted({*self._service.fleets, *(environment for environment, _ in census.tasks)}):
            running = dict.fromkeys(ClockName, 0)
            for state in TaskState:
                number = census.tasks.get((name, state.value), 0)
                if state is not TaskState.ENDED:
                    tasks.add_metric([name, state.value], number)
                for clock in RUNNING[state]:
                    running[clock] += number
            for clock, number in running.items():
                clocks.add_metric([name, clock.value], number)
            if name in census.left_s:
                left.add_metric([name], census.left_s[name])
            taken.add_metric([name], census.taken.get(name, 0))
            queue.add_metric([name], census.waiting.get(name, 0))
        yield from (tasks, clocks, left, taken, queue)

    def _of_servers(self, census: Census) -> Iterator[Metric]:
        words = "Environment servers, of all replicas."
        servers = GaugeMetricFamily("tide_gateway_instances", words, labels=["environment", "state"])
        for name in sorted({*self._service.fleets, *(environment for environment, _ in census.instances)}):
            for state in InstanceState:
                servers.add_metric([name, state.value], census.instances.get((name, state.value), 0))
        yield servers


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=float(value))
