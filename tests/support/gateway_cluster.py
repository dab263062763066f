"""Real gateway processes on one database, killed and restarted at will, seen only from outside.

    cluster.start(0), kill(0), restart(0), stop(0) -> `tide-gateway serve` on a port that stays
    servers() -> environment servers by the mark in their environment     orphans() -> those that no gateway lists

All methods block; from an event loop call them through `asyncio.to_thread`.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import tomli_w
from gateway_process import STOP_S, Replica, place
from marked_servers import COOKIE, MarkedServer, find_containers, find_processes, remove

SCRIPTED_SERVER = str(Path(__file__).resolve().parent.parent / "gateway" / "scripted_server.py")
LIMITS = {"start": 30.0, "idle": 20.0, "turn": 10.0, "active": 100.0, "end": 5.0}


def scripted(runtime: str = "process", **options: Any) -> dict[str, Any]:
    """The table of a scripted environment, whose tasks follow the parameters of `tide_gateway.runtimes.fake.Script`.

    Args:
        runtime: process, docker, remote, ray or fake; docker and remote need their own table among the options.
        options: keys of the table that replace or join the usual ones; `limits` joins the usual limits.
    """
    table: dict[str, Any] = {"runtime": runtime, "capacity": 16, "servers": 1, "probe_interval_s": 0.5}
    if runtime == "process":
        table["command"] = [sys.executable, SCRIPTED_SERVER, "--uds", "{uds}", "--capacity", "{capacity}"]
    return table | options | {"limits": LIMITS | options.get("limits", {})}


class GatewayCluster:
    """Gateway processes on one database.

    As a context manager it stops everything at the end, and fails the block where that did not go well.

    Args:
        folder: for the configuration, logs, announcements and the gateways' data.
        database_url: `sqlite:///FILE` (one replica only) or `postgresql://...`.
        environments: the tables of `environments.toml` by name, or its text.
        replicas: how many gateways there can be; `start` starts one.
        options: further words of the command line.
        outlive_s: seconds for which environment servers outlive a killed gateway; None leaves the option out.
        keep: leave tasks and servers to the next gateway at SIGTERM.
        environ: variables of the gateways on top of this process's, whose `TIDE_GATEWAY_` ones are left out.
        token: sent by this object's own calls.
        docker_host: `unix://` engine whose containers are counted too.
    """

    def __init__(
        self,
        folder: Path,
        database_url: str,
        environments: str | Mapping[str, Mapping[str, Any]],
        replicas: int = 1,
        *,
        options: Sequence[str] = (),
        outlive_s: float | None = None,
        keep: bool = False,
        environ: Mapping[str, str] | None = None,
        token: str | None = None,
        docker_host: str | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.database_url = database_url
        self.cookie = secrets.token_hex(8)
        self.config = folder / "environments.toml"
        self.replicas = [place(folder, number) for number in range(replicas)]
        self.keeps = keep
        self._options = list(options)
        if outlive_s is not None:
            self._options += ["--outlive-s", f"{outlive_s:g}"]
        if keep:
            self._options.append("--keep")
        if not database_url.startswith("sqlite"):
            self._options += ["--data", str(folder / "data")]
        self._environ = dict(environ or {})
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._docker_host = docker_host
        self._ended_by_kill = False
        self.write_environments(environments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        problems = self.close()
        if kind is None and problems:
            raise AssertionError("\n".join([f"after the stop (logs in {self.folder}):", *problems]))

    @property
    def urls(self) -> list[str]:
        """Where the replicas answer, in order, whether or not they run now."""
        return [replica.url for replica in self.replicas]

    @property
    def running(self) -> list[int]:
        """Numbers of the replicas whose process lives."""
        return [replica.number for replica in self.replicas if replica.running]

    def write_environments(self, environments: str | Mapping[str, Mapping[str, Any]]) -> Path:
        """Write `environments.toml` for the next start; each environment's variables get this cluster's cookie."""
        tables = tomllib.loads(environments)["environments"] if isinstance(environments, str) else environments
        # The gateway passes on few of its own variables: a mark must come through the table.
        marked = {
            name: t if t.get("runtime") in ("remote", "fake") else {**t, "env": self._marked(t)}
            for name, t in tables.items()
        }
        self.config.write_text(tomli_w.dumps({"environments": marked}))
        return self.config

    def start_all(self) -> Self:
        """Start every replica that does not run, all at once, and wait for them."""
        for replica in self.replicas:
            self.start(replica.number, wait=False)
        for replica in self.replicas:
            replica.wait_ready()
        return self

    def start(self, number: int = 0, *, wait: bool = True) -> Replica:
        """Start a replica; nothing where it runs already.

        Raises:
            AssertionError: it ended, or was not ready in time; the message has its log.
        """
        replica = self.replicas[number]
        if not replica.running:
            self._ended_by_kill = False
            replica.start(self.command_line(number), self._variables())
        if wait:
            replica.wait_ready()
        return replica

    def command_line(self, number: int = 0) -> list[str]:
        """The words that start a replica."""
        replica = self.replicas[number]
        argv = [sys.executable, "-m", "tide_gateway", "serve", "--config", str(self.config)]
        argv += ["--host", "127.0.0.1", "--port", str(replica.port), "--database", self.database_url]
        return [*argv, "--announce", str(replica.announce), *self._options]

    def kill(self, number: int = 0) -> None:
        """SIGKILL a replica; returns once it is dead. Nothing where it does not run."""
        if self.replicas[number].kill():
            self._ended_by_kill = True

    def stop(self, number: int = 0, signal_number: int = signal.SIGTERM, timeout_s: float = STOP_S) -> int | None:
        """Stop a replica by a signal and return its exit code; None where it was not started.

        Raises:
            AssertionError: it did not end in time; it was killed then.
        """
        code = self.replicas[number].stop(signal_number, timeout_s)
        self._ended_by_kill = self._ended_by_kill and code != 0
        return code

    def hang(self, number: int, hung: bool) -> None:
        """Stop or continue a replica's process: its connections stay open, and nothing of it moves."""
        self.replicas[number].send(signal.SIGSTOP if hung else signal.SIGCONT)

    def restart(self, number: int = 0, *, kill: bool = True, wait: bool = True) -> Replica:
        """Kill (or stop) a replica and start it again at the same address."""
        if kill:
            self.kill(number)
        else:
            self.stop(number)
        return self.start(number, wait=wait)

    def pid(self, number: int = 0) -> int:
        """The process id of a replica that was started."""
        return self.replicas[number].pid

    def client(self, number: int = 0, token: str | None = None) -> httpx.Client:
        """A plain client of one replica."""
        headers = {"Authorization": f"Bearer {token}"} if token else self._headers
        return httpx.Client(base_url=self.replicas[number].url, headers=headers, timeout=30)

    def log(self, number: int = 0) -> str:
        """All that a replica has logged, its earlier runs included."""
        return self.replicas[number].text()

    def view(self, path: str, number: int | None = None) -> Any:
        """The parsed answer of a GET call, from the first replica that runs unless one is named."""
        with self.client(self.running[0] if number is None else number) as client:
            return client.get(path).raise_for_status().json()

    def listed(self) -> dict[str, int]:
        """Environment servers that the running gateways list: name -> tasks."""
        found: dict[str, int] = {}
        for number in self.running:
            for environment in self.view("/environments", number):
                found |= {server["name"]: server["tasks"] for server in environment["servers"]}
        return found

    def servers(self) -> list[MarkedServer]:
        """Environment servers of this cluster that exist: groups of processes, and containers."""
        found = find_containers(self._docker_host, self.cookie) if self._docker_host else []
        names = {server.name for server in found}
        # A container's processes are seen from outside too.
        return found + [server for server in find_processes(self.cookie) if server.name not in names]

    def orphans(self) -> list[MarkedServer]:
        """Servers that exist and that no running gateway lists; without a running gateway, all of them."""
        # Servers first: one that is launched in between is listed, but not found.
        servers = self.servers()
        listed = self.listed() if self.running else {}
        return [server for server in servers if server.name not in listed]

    def wait_no_orphans(self, timeout_s: float = 20.0) -> list[MarkedServer]:
        """Wait until there are no orphans; what is left after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while (left := self.orphans()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return left

    def close(self, timeout_s: float = STOP_S) -> list[str]:
        """Stop all replicas with SIGTERM, and kill every server that is left. Safe to repeat.

        Returns:
            What went wrong, in words: gateways that did not stop well, and orphans, which are servers that the stop
            should have ended; none are where the last gateway was killed or keeps its servers.
        """
        problems: list[str] = []
        stopping = self.running
        for number in stopping:
            self.replicas[number].send(signal.SIGTERM)
        deadline_s = time.monotonic() + timeout_s
        for number in stopping:
            try:
                code = self.stop(number, timeout_s=max(0.1, deadline_s - time.monotonic()))
            except AssertionError as error:
                problems.append(str(error))
            else:
                problems += [f"replica {number} ended with {code}:\n{self.log(number)[-2000:]}"] if code else []
        for replica in self.replicas:
            replica.free_port()
        left = self.servers()
        remove(left, self._docker_host)
        return problems + ([] if self._ended_by_kill or self.keeps else [f"orphan: {server}" for server in left])

    def _marked(self, table: Mapping[str, Any]) -> dict[str, str]:
        here = {"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}
        mine = here if table.get("runtime", "process") == "process" else {}
        return {**mine, **table.get("env", {}), COOKIE: self.cookie}

    def _variables(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("TIDE_GATEWAY_")}
        docker = {"DOCKER_HOST": self._docker_host} if self._docker_host else {}
        return own | docker | self._environ
