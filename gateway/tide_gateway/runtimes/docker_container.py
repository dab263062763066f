"""From an environment's table to what an engine is asked to create. Pure: no engine, no files, no clock."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tide_gateway.runtimes import LaunchFailed
from tide_gateway.specs import DockerOptions, EnvironmentSpec

DEPLOYMENT = "tide.deployment"
INSTANCE = "tide.instance"
ENVIRONMENT = "tide.environment"
"""Labels of every container: whose it is, which instance, of which environment."""
NETWORK = "tide.network"
INTERNAL = "internal"
PUBLISHED = "published"
"""Label of every network, and the two kinds of them."""

SOCKET_FOLDER = "/run/tide"
SOCKET_NAME = "env.sock"
_LOG_FILE_SIZE = "2m"
_LOG_FILES = "2"
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Way:
    """How one container is reached; what its connection needs was made before.

    Attributes:
        folder: folder of this machine that holds the socket, "" without one.
        port: port that the server shall listen on, 0 with a socket.
        network: the engine's network to join: `none`, `host` or a name.
        publish: address of the engine's machine on which the port is published, "" publishes none.
        bind: address that the server shall listen on (TIDE_HOST), "" leaves it to the image.
    """

    folder: str = ""
    port: int = 0
    network: str = "none"
    publish: str = ""
    bind: str = ""


def container_name(deployment: str, name: str) -> str:
    """The one name that an instance's container has, on whatever engine."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    if safe != name:
        # Two names that differ only in what engines do not take stay two.
        safe = f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"tide-{deployment}-{safe}"


def network_config(deployment: str, kind: str, mark: str) -> dict[str, Any]:
    """What an engine is asked to create as a network of the deployment.

    Args:
        deployment: whose network it is.
        kind: `internal`, or `published` for one whose ports can be published. Engines publish no ports of an internal
            network; the other kind does without address translation, so that an answer from outside finds no way
            back in. On both, containers cannot call each other.
        mark: makes the name unique; engines take a name twice, and then cannot tell the two apart.
    """
    options = {"com.docker.network.bridge.enable_icc": "false"}
    if kind == PUBLISHED:
        options["com.docker.network.bridge.enable_ip_masquerade"] = "false"
    return {
        "name": f"tide-{deployment}-{mark}",
        "driver": "bridge",
        "internal": kind == INTERNAL,
        "options": options,
        "labels": {DEPLOYMENT: deployment, NETWORK: kind},
    }


def container_config(
    deployment: str, name: str, spec: EnvironmentSpec, options: DockerOptions, way: Way
) -> dict[str, Any]:
    """The body of the engine's `POST /containers/create`.

    Raises:
        LaunchFailed: the command asks for what this connection does not have.
    """
    filled = {"capacity": str(spec.tasks_per_server)}
    if way.folder:
        filled["uds"] = f"{SOCKET_FOLDER}/{SOCKET_NAME}"
    else:
        filled["port"] = str(way.port)
    if way.bind:
        filled["host"] = way.bind
    variables = {**spec.env, **{f"TIDE_{key.upper()}": value for key, value in filled.items()}, "TIDE_INSTANCE": name}
    config: dict[str, Any] = {
        "Image": options.image,
        "Env": [f"{key}={value}" for key, value in variables.items()],
        "Labels": {DEPLOYMENT: deployment, INSTANCE: name, ENVIRONMENT: spec.name},
        "User": options.user,
        # The gateway probes by itself; an image's own check would cost a process each time.
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(options, way),
    }
    if spec.command:
        config["Cmd"] = [_fill(word, filled, options.connect) for word in spec.command]
    if way.publish:
        config["ExposedPorts"] = {f"{way.port}/tcp": {}}
    return config


def _host_config(options: DockerOptions, way: Way) -> dict[str, Any]:
    memory = options.memory_mb * _MIB
    host: dict[str, Any] = {
        "ReadonlyRootfs": options.read_only,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "Privileged": False,
        "Memory": memory,
        "MemorySwap": memory,  # no swap on top
        "NanoCpus": int(options.cpus * 1e9),
        "PidsLimit": options.pids,
        "NetworkMode": way.network,
        # An init that reaps children; killed, it takes every process of the container along.
        "Init": True,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": _LOG_FILE_SIZE, "max-file": _LOG_FILES}},
        "Mounts": [_mount(mount) for mount in options.mounts],
    }
    if options.tmpfs_mb:
        # Programs may run there: environments that compile have no other place.
        host["Tmpfs"] = {"/tmp": f"rw,exec,nosuid,nodev,size={options.tmpfs_mb}m,mode=1777"}  # noqa: S108
    if way.folder:
        host["Mounts"].append({"Type": "bind", "Source": way.folder, "Target": SOCKET_FOLDER, "ReadOnly": False})
    if way.publish:
        host["PortBindings"] = {f"{way.port}/tcp": [{"HostIp": way.publish, "HostPort": ""}]}
    if options.runtime:
        host["Runtime"] = options.runtime
    return host


def _mount(text: str) -> dict[str, Any]:
    source, _, target = text.rpartition(":")
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True}


def _fill(word: str, filled: Mapping[str, str], connect: str) -> str:
    for key in ("uds", "port", "announce", "capacity"):
        mark = "{" + key + "}"
        if mark not in word:
            continue
        if key not in filled:
            wanted = "{uds}" if connect == "uds" else "{port}"
            raise LaunchFailed(f'command: holds {mark}, but connect = "{connect}" gives {wanted}; write that')
        word = word.replace(mark, filled[key])
    return word


def published_port(inspected: Mapping[str, Any], port: int) -> int:
    """The engine machine's port that leads to the container's.

    Raises:
        LaunchFailed: it is not published.
    """
    bindings = (inspected["NetworkSettings"].get("Ports") or {}).get(f"{port}/tcp") or []
    if not bindings:
        raise LaunchFailed(f"the engine published no port for the container's port {port}")
    return int(bindings[0]["HostPort"])


def own_address(inspected: Mapping[str, Any]) -> str:
    """The container's own address in its network.

    Raises:
        LaunchFailed: it has none.
    """
    for network in (inspected["NetworkSettings"].get("Networks") or {}).values():
        if network.get("IPAddress"):
            return network["IPAddress"]
    raise LaunchFailed("the engine gave the container no address in its network")


@dataclass(frozen=True, slots=True)
class State:
    """What an engine says about a container.

    Attributes:
        is_alive: it runs, or is frozen.
        is_frozen: all its processes are stopped.
        is_over: it ran and ended.
        exit_code: with which code.
        is_oom: it, or a process of it, had used up its memory.
    """

    is_alive: bool
    is_frozen: bool
    is_over: bool
    exit_code: int
    is_oom: bool

    @classmethod
    def of(cls, inspected: Mapping[str, Any]) -> State:
        """The state in the answer to an inspection."""
        state = inspected["State"]
        return cls(
            is_alive=bool(state.get("Running")),
            is_frozen=bool(state.get("Paused")),
            is_over=state.get("Status") in ("exited", "dead", "removing"),
            exit_code=int(state.get("ExitCode", 0)),
            is_oom=bool(state.get("OOMKilled")),
        )
