"""What an operator says about each environment: the tables of `environments.toml`, as checked models.

One table per environment, and in it one table of options for its runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tide_sdk.clocks import ClockName
from tide_sdk.wire import Limits, Seconds

DEFAULT_LIMITS: Mapping[ClockName, float] = {
    ClockName.START: 60.0,
    ClockName.IDLE: 600.0,
    ClockName.TURN: 120.0,
    ClockName.ACTIVE: 3600.0,
    ClockName.END: 10.0,
}
PLACEHOLDERS = ("uds", "announce", "port")
_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RuntimeName = Literal["process", "docker", "remote", "ray", "fake"]


class Options(BaseModel):
    """Base of the tables below: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ProcessOptions(Options):
    """`[environments.NAME.process]`: limits of each server process and what it inherits.

    Attributes:
        inherit: variables passed on from the gateway's own environment besides the harmless ones (PATH, HOME, LANG,
            PYTHON* and the like); `HF_*` passes all that begin so, `*` all but `TIDE_GATEWAY_*`.
        memory_mb: address space of each process of the server, 0 for no limit.
        max_processes: the server can make no further process or thread while the gateway's user has so many, its own
            and all others counted; 0 for no limit. Root is not bound by it.
        max_open_files: open files of each process of the server, 0 for the gateway's own limit.
    """

    inherit: tuple[str, ...] = ()
    memory_mb: Annotated[int, Field(ge=0, le=1_048_576)] = 0
    max_processes: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_open_files: Annotated[int, Field(ge=0, le=1_048_576)] = 0


class DockerOptions(Options):
    """`[environments.NAME.docker]`: the image and the container's limits.

    Attributes:
        image: image that serves the contract; it gets `TIDE_CAPACITY`, and `TIDE_UDS` (a socket to listen on) or
            `TIDE_PORT` (a port of all interfaces). A `command` replaces the image's own; its entry point stays.
        engines: engines that containers are spread over, `unix:///path` or `tcp://host:port`; empty takes DOCKER_HOST
            or the local socket.
        connect: `uds` shares a unix socket with a container that has no network (engines of this machine only);
            `bridge` puts the container into an internal network and calls its address (the engine's iptables rules
            keep it in; the engine's own machine it can reach); `host` uses the engine's network (only for environments
            that you trust).
        address: for `bridge` on a remote engine, the host's address at which published ports are reached; empty takes
            the container's own address. A number is also what the ports are bound to, a name binds all of the host's.
        port: the container's port for `bridge`; for `host` each container gets a free one.
        pull: `missing` pulls an image once per engine where it is not there, `never` refuses, `always` pulls once for
            each launch.
        platform: what the image must be built for, for example `linux/amd64`; empty takes the engine's own.
        memory_mb, cpus, pids: limits of each container.
        tmpfs_mb: size of `/tmp`, the only place where a read-only container can write; 0 leaves it out.
        user: user and group of the container's processes; never root unless you write it here. A gateway that is not
            root writes its own here, where the environment's socket is for its owner alone.
        read_only: the container's own files cannot be changed.
        network: name of an engine network to join, for environments that need one; empty gives none.
        mounts: `HOST_PATH:CONTAINER_PATH`, mounted read-only.
        runtime: the engine's OCI runtime, for example `runsc`; empty takes its default.
    """

    image: Annotated[str, Field(min_length=1, max_length=512)]
    engines: tuple[Annotated[str, Field(pattern=r"^(unix:///|tcp://)[!-~]+$")], ...] = ()
    connect: Literal["uds", "bridge", "host"] = "uds"
    address: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]*$")] = ""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    pull: Literal["missing", "never", "always"] = "missing"
    platform: Annotated[str, Field(pattern=r"^([a-z0-9]+/[a-z0-9_]+(/[a-z0-9]+)?)?$")] = ""
    memory_mb: Annotated[int, Field(ge=16, le=4_194_304)] = 1024
    cpus: Annotated[float, Field(ge=0.01, le=1024)] = 1.0
    pids: Annotated[int, Field(ge=8, le=1_000_000)] = 256
    tmpfs_mb: Annotated[int, Field(ge=0, le=1_048_576)] = 64
    user: Annotated[str, Field(min_length=1, max_length=64)] = "65534:65534"
    read_only: bool = True
    network: str = ""
    mounts: tuple[Annotated[str, Field(pattern=r"^/[^:\x00]*:/[^:\x00]*$")], ...] = ()
    runtime: str = ""

    @model_validator(mode="after")
    def _check_connection(self) -> DockerOptions:
        if self.connect == "uds" and any(not url.startswith("unix:") for url in self.engines):
            raise ValueError('engines: connect = "uds" needs engines of this machine (unix:///...); take "bridge"')
        if self.connect == "uds" and self.address:
            raise ValueError('address: only for connect = "bridge" or "host"')
        if self.connect == "host" and self.network:
            raise ValueError('network: connect = "host" uses the engine\'s own network; leave network out')
        return self


class RemoteUrl(NamedTuple):
    """The parts of an environment server's URL; the host is a name, an IPv4 or an IPv6 address without brackets."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> RemoteUrl:
        """The parts of `http(s)://host[:port][/prefix]`.

        Raises:
            ValueError: anything else: another scheme, a user name, a query, a fragment, a port outside 1-65535.
        """
        # A message never repeats the URL: what is wrong with it may be that it holds a password.
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ValueError("a URL must not hold a user name or password; put a token into token_file")
        if _URL.fullmatch(url) is None:
            raise ValueError("expected http(s)://host[:port][/prefix], without query and fragment")
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:  # a port that is no number up to 65535
            host, port = None, None
        if not host or port == 0:
            raise ValueError("expected a host and, where it is given, a port from 1 to 65535")
        scheme = "https" if parts.scheme == "https" else "http"
        return cls(scheme, host, port or (443 if scheme == "https" else 80), parts.path.rstrip("/"))


class RemoteOptions(Options):
    """`[environments.NAME.remote]`: environment servers that somebody else runs.

    Attributes:
        urls: `http(s)://host[:port][/prefix]`, one server each; `servers` follows from their number.
        allow_private: also call addresses of private networks, of this machine and link-local ones.
        token_file: file with the bearer token that the servers ask for; empty sends none.
        ca_file: certificates that `https` servers are checked against; empty takes the system's.
    """

    urls: Annotated[tuple[str, ...], Field(min_length=1, max_length=1024)]
    allow_private: bool = False
    token_file: str = ""
    ca_file: str = ""

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for number, url in enumerate(urls):
            try:
                RemoteUrl.parse(url)
            except ValueError as error:
                raise ValueError(f"urls[{number}]: {error}") from None
        if len(set(urls)) != len(urls):
            raise ValueError("urls: each server once; for more tasks on it raise capacity")
        return urls


class RayOptions(Options):
    """`[environments.NAME.ray]`: server processes spread over a Ray cluster; the environment's `command` is run there.

    The nodes need the environment's own package, and Ray of the gateway's version; nothing else of ours. A server has
    its node's variables, `env`, and TIDE_HOST, TIDE_PORT (for `{port}`) and TIDE_CAPACITY, so that a command can be
    `tide-env serve MODULE:CLASS --host {host} --port {port} --allow-public`.

    Attributes:
        address: the cluster, as `ray.init(address=...)` takes it; empty takes RAY_ADDRESS, or the cluster that runs on
            this machine, or starts one that ends with the gateway.
        num_cpus, memory_mb: what the cluster reserves for each server; 0 MB reserves none.
        resources: custom resources, for example `{browser = 1.0}`.
    """

    address: str = ""
    num_cpus: Annotated[float, Field(ge=0, le=1024)] = 1.0
    memory_mb: Annotated[int, Field(ge=0, le=4_194_304)] = 0
    resources: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict[str, float])


class EnvironmentSpec(Options):
    """One registered environment.

    Attributes:
        name: what `/start` calls it.
        runtime: `process` starts servers with `command`, `docker` from an image, `ray` on a cluster, `remote` finds
            them at their URLs; `fake` is the scripted one for tests.
        command: argv of one environment server. `{uds}` becomes a unix socket to listen on, or `{announce}` a file
            into which the server writes `{"url": ...}` when it is ready, or `{port}` a free TCP port of 127.0.0.1;
            exactly one of them must occur. `{capacity}` becomes the tasks that one server shall hold. For `docker` it
            replaces the image's own command, where it is given. For `ray` also `{host}` becomes the address of the node
            that the server runs on, and it must listen there.
        env: further environment variables of the server.
        capacity: tasks at once, starting and ending ones counted.
        servers: environment servers at most; tasks are spread evenly.
        owner_capacity: tasks at once of one owner, 0 for no limit of its own.
        eval_reserved: slots that only tasks of kind `eval` get.
        start_rate: starts per second, 0 for no limit; apart from the capacity, so that bursts do not swamp hosts.
        start_burst: starts that may come at once before the rate holds.
        max_queue: refused starts whose place in the queue is kept; one more is refused without a place.
        warm: servers kept ready without a task, within `servers`.
        retire_after: tasks after which a server gets no more and is replaced, 0 for never; 1 with `servers = capacity`
            is a fresh container per task.
        freeze: also stop the server's processes while its task is paused; only with one task per server.
        max_pause_s: a task paused longer ends, 0 for no cap.
        max_wall_s: a task older than that ends, paused or not, 0 for no cap.
        limits: clock limits in seconds; what is left out has its default.
        probe_interval_s: seconds between health probes of each server.
    """

    name: str
    runtime: RuntimeName = "process"
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    capacity: Annotated[int, Field(ge=1, le=100_000)] = 8
    servers: Annotated[int, Field(ge=1, le=10_000)] = 1
    owner_capacity: Annotated[int, Field(ge=0, le=100_000)] = 0
    eval_reserved: Annotated[int, Field(ge=0, le=100_000)] = 0
    start_rate: Annotated[float, Field(ge=0, le=100_000, allow_inf_nan=False)] = 0.0
    start_burst: Annotated[int, Field(ge=1, le=100_000)] = 1
    max_queue: Annotated[int, Field(ge=0, le=100_000)] = 4096
    warm: Annotated[int, Field(ge=0, le=10_000)] = 0
    retire_after: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    freeze: bool = False
    max_pause_s: Annotated[float, Field(ge=0, le=365 * 86400, allow_inf_nan=False)] = 0.0
    max_wall_s: Annotated[float, Field(ge=0, le=365 * 86400, allow_inf_nan=False)] = 0.0
    limits: Limits = Field(default_factory=dict)
    probe_interval_s: Seconds = 5.0
    process: ProcessOptions = Field(default_factory=ProcessOptions)
    docker: DockerOptions | None = None
    remote: RemoteOptions | None = None
    ray: RayOptions | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError("use letters, digits, dot, dash and underscore, at most 64, the first a letter or digit")
        return name

    @property
    def all_limits(self) -> dict[ClockName, float]:
        """The limits with the defaults filled in."""
        return {**DEFAULT_LIMITS, **self.limits}

    @property
    def tasks_per_server(self) -> int:
        """Tasks that one server is given at most."""
        return -(-self.capacity // self.servers)

    def problem(self) -> str | None:
        """What is wrong across fields, None if nothing is."""
        if self.servers > self.capacity:
            return f"servers: {self.servers} is more than capacity {self.capacity}; lower servers or raise capacity"
        if self.eval_reserved >= self.capacity:
            return f"eval_reserved: {self.eval_reserved} of capacity {self.capacity} leaves nothing for training"
        if self.warm > self.servers:
            return f"warm: {self.warm} is more than servers {self.servers}; lower warm or raise servers"
        if self.freeze and (self.tasks_per_server != 1 or self.runtime not in ("process", "docker", "fake")):
            return "freeze: needs servers = capacity (one task per server) and the runtime process or docker"
        for kind in ("docker", "remote", "ray"):
            if (getattr(self, kind) is not None) != (self.runtime == kind) and not (kind == self.runtime == "ray"):
                wrong = "missing" if self.runtime == kind else f'only for runtime = "{kind}"'
                return f"{kind}: {wrong}; write [environments.{self.name}.{kind}]"
        if self.runtime != "process" and self.process != ProcessOptions():
            return f'process: only for runtime = "process"; remove [environments.{self.name}.process]'
        if any(not name or "=" in name for name in self.env):
            return "env: a variable's name must not be empty or hold an equals sign"
        if any("\0" in text for text in (*self.command, *self.env, *self.env.values())):
            return "command, env: must not hold a NUL character"
        if self.remote is not None and self.servers != len(self.remote.urls):
            return f"servers: {self.servers}, but remote.urls names {len(self.remote.urls)}; make them equal"
        return self._command_problem()

    def _command_problem(self) -> str | None:
        if self.runtime in ("remote", "fake"):
            given = "command" if self.command else "env" if self.env else ""
            return f"{given}: the {self.runtime} runtime takes none" if given else None
        if self.runtime == "docker" and not self.command:
            return None
        if not self.command or not self.command[0]:
            return 'command: missing; for example ["tide-env", "serve", "module:Class", "--uds", "{uds}"]'
        if self.runtime == "docker":
            return None
        found = [name for name in PLACEHOLDERS if any("{" + name + "}" in word for word in self.command)]
        if len(found) != 1:
            return "command: must hold exactly one of {uds}, {announce}, {port}, so that the gateway finds the server"
        if self.runtime == "ray" and found == ["uds"]:
            return "command: on a Ray cluster use {announce} or {port}; a unix socket is not reached from other nodes"
        return None
