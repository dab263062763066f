"""A Ray cluster of several nodes on this machine, in a process of its own: `python ray_cluster.py NODES CPUS`.

It writes `{"address": ..., "nodes": [id, ...]}`. A line `add RESOURCE` adds a node with ten of that resource and is
answered with `{"node": id}`; `kill ID` ends a node at once; the end of standard input ends all.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_gateway.runtimes import Server
    from tide_gateway.specs import EnvironmentSpec

SERVER = str(Path(__file__).with_name("scripted_tcp.py"))
COMMAND = (sys.executable, SERVER, "{host}", "{port}", "{capacity}")
NUM_NODES = 2
CPUS = 4
STORE_BYTES = 80 * 1024 * 1024


class RayCluster:
    """The parent's side.

    Attributes:
        address: for `ray.init`.
        nodes: the nodes that have processors.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        told = self._read()
        self.address: str = told["address"]
        self.nodes: list[str] = told["nodes"]

    def add(self, resource: str) -> str:
        """Add a node that only servers which ask for the resource come to; its id."""
        return self._ask(f"add {resource}")["node"]

    def kill(self, node: str) -> None:
        """End a node and all that runs on it."""
        self._ask(f"kill {node}")

    def _ask(self, line: str) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster's process ended"
        return json.loads(line)


def environ() -> dict[str, str]:
    """Variables for the cluster and whoever joins it: nothing is reported, and no token is written into a home."""
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A head without processors, and `NUM_NODES` nodes of `CPUS` each."""
    argv = [sys.executable, __file__, str(NUM_NODES), str(CPUS)]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ(), start_new_session=True
    )
    try:
        yield RayCluster(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise


@functools.cache
def shared_cluster() -> RayCluster:
    """One for the whole test process, as it takes half a minute to come; it ends with the process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(ray_cluster())


def ray_spec(address: str, *command: str, options: dict[str, Any] | None = None, **values: Any) -> EnvironmentSpec:
    from tide_gateway.specs import EnvironmentSpec

    ray = {"address": address} | (options or {})
    values = {"name": "scripted", "runtime": "ray", "command": command or COMMAND, "capacity": 8, "ray": ray} | values
    return EnvironmentSpec.model_validate(values)


def told_by(server: Server) -> dict[str, Any]:
    """What the place's handle says: address, node, pid (a process of this machine, as all nodes are), actor."""
    return json.loads(server.place.handle)


def main() -> None:
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def tell(**answer) -> None:
            print(json.dumps(answer), file=out, flush=True)

        from ray.cluster_utils import Cluster

        num_nodes, cpus = map(int, sys.argv[1:])
        # A node that is gone is noticed in two seconds and not in fifteen.
        health = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 4,
        }
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": health}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        nodes = {}

        def add(**options) -> str:
            node = cluster.add_node(object_store_memory=STORE_BYTES, **options)
            nodes[node.node_id] = node
            return node.node_id

        tell(nodes=[add(num_cpus=cpus) for _ in range(num_nodes)], address=cluster.address)
        for line in sys.stdin:
            verb, what = line.split()
            if verb == "add":
                tell(node=add(num_cpus=0, resources={what: 10}))
            else:
                cluster.remove_node(nodes.pop(what), allow_graceful=False)
                tell()
        cluster.shutdown()


if __name__ == "__main__":
    main()
