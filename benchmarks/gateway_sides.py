"""What bench_gateway measures: an environment server alone, and the same program behind a gateway on each database."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from gateway_load import Client
from gateway_plan import Plan
from process_times import Processes
from processes import ROOT

# The harness that tests and benchmarks share lies beside the tests.
sys.path.insert(0, str(ROOT / "tests" / "support"))

from gateway_cluster import GatewayCluster
from postgres_server import NoServer, PostgresServer

CAPACITY = 512
OUTLIVE_S = 3600.0
"""Longer than a gateway stays frozen, which its servers take for its death."""
READY_S = 60.0
STOP_S = 10.0
SERVERS = ("fastapi", "sdk")
ALONE = "alone"
ROUTES = (ALONE, "sqlite", "sqlite-full", "postgres")
"""`sqlite` is the default, synchronous=NORMAL; `sqlite-full` waits for the disk at each commit."""


@dataclass(slots=True)
class Side:
    """Something that answers the contract's calls, with the server program that stands behind it.

    Attributes:
        server: of `SERVERS`.
        route: of `ROUTES`.
        url: where it answers.
        processes: whose CPU time counts.
        cluster: its gateway; None for a server alone.
        all_turns: turns that it has answered, for the count of its rows.
    """

    server: str
    route: str
    url: str
    processes: dict[str, Processes] = field(default_factory=dict[str, Processes])
    cluster: GatewayCluster | None = None
    all_turns: int = 0

    @property
    def name(self) -> str:
        """For keys and messages."""
        return f"{self.server}-{self.route}"

    def freeze(self) -> None:
        """Stop its processes, so that while it rests it takes nothing from what is measured; not the database's."""
        for name in ("gateway", "environment"):
            self._signal(name, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on; whatever ended meanwhile is left out."""
        for name in ("environment", "gateway"):
            self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        for pid in self.processes[name].pids if name in self.processes else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def command(server: str, *place: str) -> list[str]:
    """The words that serve an environment: `--port N` or `--uds PATH` is the place."""
    if server == "fastapi":
        # Its access log is left out: it would slow the baseline down, and so flatter every ratio to it.
        words = ["-m", "uvicorn", "fastapi_environment:app", "--no-access-log", "--log-level", "warning"]
    else:
        words = ["-m", "tide_sdk.cli", "serve", "sdk_environment:Counting"]
    return [sys.executable, *words, *place]


def variables() -> dict[str, str]:
    """What a server finds its module with."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))}


@contextlib.contextmanager
def server_alone(server: str, folder: Path) -> Iterator[Side]:
    """An environment server that is called directly."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / f"{server}-alone.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(server, "--port", str(port)),
            env=os.environ | variables(), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_healthy(url, process, log)
        yield Side(server, ALONE, url, {"environment": Processes((process.pid,))})
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{url}/health", timeout=5.0).raise_for_status()
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"an environment server does not answer; its log ends:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


@contextlib.contextmanager
def gateway(server: str, route: str, folder: Path, postgres: PostgresServer | None, client: Client) -> Iterator[Side]:
    """A gateway with one environment server, warm."""
    folder = folder / f"{server}-{route}"
    folder.mkdir()
    more: dict[str, Processes] = {}
    if route == "postgres":
        assert postgres is not None
        url = postgres.create_database()
        more["postgres"] = Processes((postgres.pid,), with_children=True)
    else:
        url = f"sqlite:///{folder / 'gateway.db'}" + ("?synchronous=full" if route == "sqlite-full" else "")
    table: Mapping[str, Any] = {
        "runtime": "process",
        "command": command(server, "--uds", "{uds}"),
        "env": variables(),
        "capacity": CAPACITY,
        "warm": 1,
    }
    cluster = GatewayCluster(folder, url, {"counting": table}, options=("--log-level", "warning"), outlive_s=OUTLIVE_S)
    with cluster:
        replica = cluster.start()
        side = Side(server, route, replica.url, cluster=cluster)
        # The first start waits for the environment server.
        side.all_turns += client.play(Plan(side.url, f"{side.name}/first", tasks=1, warm_s=0.0, window_s=0.1)).all_turns
        pids = tuple(pid for found in cluster.servers() for pid in found.pids)
        side.processes = {"gateway": Processes((replica.pid,)), "environment": Processes(pids), **more}
        yield side


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server as an operator runs it: what is committed is on the disk, and dead row versions are removed.

    Raises:
        NoServer: there is none on this machine.
    """
    server = PostgresServer(fsync=True, settings={"autovacuum": "on", "shared_buffers": "128MB"})
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def open_sides(servers: list[str], routes: list[str], folder: Path, client: Client) -> Iterator[list[Side]]:
    """Everything that is measured, ready and frozen; a baseline first, then its gateways."""
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(postgres_server()) if "postgres" in routes else None
        sides: list[Side] = []
        for server in servers:
            for route in routes:
                if route == "sqlite-full" and server != SERVERS[0]:
                    continue  # what waiting for the disk costs, one server shows
                if route == ALONE:
                    sides.append(stack.enter_context(server_alone(server, folder)))
                else:
                    sides.append(stack.enter_context(gateway(server, route, folder, postgres, client)))
                sides[-1].freeze()
                # Before its own end, which would wait for it.
                stack.callback(sides[-1].thaw)
        yield sides


def without_missing(routes: list[str]) -> tuple[list[str], str]:
    """The routes that this machine has, and what is said of those that it has not."""
    if "postgres" in routes:
        try:
            from postgres_server import programs_folder

            programs_folder()
        except NoServer as error:
            return [route for route in routes if route != "postgres"], f"without PostgreSQL: {error}"
    return routes, ""
