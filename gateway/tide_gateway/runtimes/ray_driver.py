"""The process that speaks to one Ray cluster for the gateway: `python -P -m tide_gateway.runtimes.ray_driver`.

    first line in: where the cluster is    ->  {"ready": true} or {"failed": why}
    then requests {id, op, name, ...}      ->  {id, ok} or {id, failed} or {id, gone}; and {exited: name} by itself

Lines of JSON on standard input and output. A process of its own because Ray ends a driver that loses its cluster,
because one process knows one cluster only, and because a call that hangs in it hangs nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tide_gateway.runtimes import ray_actor
from tide_gateway.runtimes.ray_link import last_line

NUM_THREADS = 256
"""Requests at once; each waits for its actor in a thread."""
STOP_S = 8.0
"""Seconds for an actor to stop its server, beyond the grace; it is killed then."""
_GONE_S = 5.0
_AGAIN_S = 0.5
_EXIT_S = 10.0
_LOCAL_STORE_BYTES = 80 * 1024 * 1024
_MARGIN_S = 0.25


class Failed(Exception):
    """The request cannot be done; the message says why."""


class NoActor(Exception):
    """There is no such server on the cluster."""


class Driver:
    """Does the requests; one for the life of the process.

    Args:
        config: `address`, empty for the machine's cluster or a new local one, and the actors' `namespace`.
        out: where answers are written.
    """

    def __init__(self, config: dict[str, Any], out: Any) -> None:
        self._config = config
        self._prefix = f"{config['namespace']}-"
        self._out = out
        self._lock = threading.Lock()
        self._launching: set[str] = set()
        self._doomed: set[str] = set()
        self._watched: set[str] = set()
        self._ray: Any = None

    def connect(self) -> None:
        """Join the cluster, or start a local one where that is meant.

        Raises:
            Exception: whatever Ray says.
        """
        import ray as imported

        ray: Any = imported  # its types leave out what it loads late
        self._ray = ray
        ray.cloudpickle.register_pickle_by_value(ray_actor)
        options = {"namespace": self._config["namespace"], "log_to_driver": False, "configure_logging": True}
        address = self._config["address"]
        try:
            ray.init(address=address or "auto", **options)
        except ConnectionError:
            if address:
                raise
            ray.init(include_dashboard=False, object_store_memory=_LOCAL_STORE_BYTES, **options)
        self._actor = ray.remote(ray_actor.ServerActor)
        self._sweep = ray.remote(ray_actor.sweep)

    def tell(self, **answer: Any) -> None:
        """Write one line."""
        line = json.dumps(answer) + "\n"
        with self._lock, contextlib.suppress(BrokenPipeError):  # the gateway ended: so will this process
            self._out.write(line)
            self._out.flush()

    def note(self, request: dict[str, Any]) -> None:
        """Take note of a request in the order in which they come: a destroy finds the launch before it."""
        with self._lock:
            if request["op"] == "launch":
                self._launching.add(request["name"])
            elif request["op"] == "destroy" and request["name"] in self._launching:
                self._doomed.add(request["name"])

    def answer(self, request: dict[str, Any]) -> None:
        """Do one request and write its answer; whatever goes wrong is an answer too."""
        number = request["id"]
        try:
            result = getattr(self, f"do_{request['op']}")(request)
        except NoActor as error:
            self.tell(id=number, gone=str(error))
        except Exception as error:  # noqa: BLE001 (reported to the gateway)
            self.tell(id=number, failed=_told(error))
        else:
            self.tell(id=number, ok=result)

    def do_launch(self, request: dict[str, Any]) -> dict[str, Any]:
        """Create the actor and wait until its server listens; nothing of it is left where that fails."""
        name, until_s = request["name"], time.monotonic() + request["timeout_s"]
        actor = None
        try:
            if name in self._doomed:
                raise Failed("it was destroyed before it was launched")
            actor = self._actor.options(
                name=self._prefix + name,
                lifetime="detached",
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD",
                **request["resources"],
            ).remote(name, request["command"], request["env"], request["capacity"])
            if name in self._doomed:
                raise Failed("it was destroyed while it was launched")
            place = self._place(actor, until_s)
            self._watch(name, actor)
            return place
        except BaseException:
            if actor is not None:
                self._kill(name, actor)
            raise
        finally:
            with self._lock:
                self._launching.discard(name)
                self._doomed.discard(name)

    def do_attach(self, request: dict[str, Any]) -> dict[str, Any]:
        """Find the actor and where its server listens."""
        name = request["name"]
        actor = self._find(name)
        try:
            place = self._place(actor, time.monotonic() + request["timeout_s"])
        except Exception as error:
            raise NoActor(_told(error)) from error
        self._watch(name, actor)
        return place

    def do_destroy(self, request: dict[str, Any]) -> str:
        """Stop the server and kill the actor, also one that hangs; the server's last words if known."""
        ray, name, grace_s = self._ray, request["name"], request["grace_s"]
        try:
            actor = self._find(name)
        except NoActor:
            return ""
        stopped: dict[str, Any] = {"over": False, "words": ""}
        with contextlib.suppress(ray.exceptions.RayError):  # it hangs, was never placed, or died at this moment
            stopped = ray.get(actor.stop.remote(grace_s), timeout=grace_s + STOP_S)
        self._kill(name, actor)
        if not stopped["over"] and request["node"]:
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(request["node"], soft=False)
            with contextlib.suppress(ray.exceptions.RayError):  # the node is gone, and the processes with it
                sweep = self._sweep.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
                ray.get(sweep.remote(name, request["actor"]), timeout=STOP_S)
        return stopped["words"]

    def do_survey(self, request: dict[str, Any]) -> list[str]:
        """The instances that have an actor, dead ones left out."""
        names = self._ray.util.list_named_actors()
        return [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]

    def _find(self, name: str) -> Any:
        try:
            return self._ray.get_actor(self._prefix + name)
        except ValueError as error:
            raise NoActor(f"the cluster has no actor of instance {name}") from error

    def _place(self, actor: Any, until_s: float) -> dict[str, Any]:
        """Two waits, so that the message says which of them took too long."""
        ray = self._ray
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=_left(until_s))
        except ray.exceptions.GetTimeoutError:
            raise Failed("no node of the Ray cluster had room for it in time") from None
        try:
            place = ray.get(actor.place.remote(), timeout=_left(until_s))
        except ray.exceptions.GetTimeoutError:
            raise Failed("the server did not say in time where it listens") from None
        if "fault" in place:
            raise Failed(f"{place['fault']}{last_line(place['words'])}")
        return place

    def _watch(self, name: str, actor: Any) -> None:
        with self._lock:
            if name in self._watched:
                return
            self._watched.add(name)
        self._await_end(name, actor)

    def _await_end(self, name: str, actor: Any) -> None:
        unavailable = self._ray.exceptions.ActorUnavailableError

        def ended(future: Future[Any]) -> None:
            error = future.exception()
            if isinstance(error, unavailable):
                # The way to it is broken, and perhaps no more than that: asked again, Ray finds out.
                timer = threading.Timer(_AGAIN_S, self._await_end, (name, actor))
                timer.daemon = True
                timer.start()
                return
            with self._lock:
                self._watched.discard(name)
            last = {"fault": _told(error), "words": ""} if error is not None else future.result()
            self.tell(exited=name, **last)

        actor.exited.remote().future().add_done_callback(ended)

    def _kill(self, name: str, actor: Any) -> None:
        """Kill the actor, and wait for its name to go, so that a survey does not find it any more."""
        self._ray.kill(actor, no_restart=True)
        until_s = time.monotonic() + _GONE_S
        while time.monotonic() < until_s:
            try:
                self._find(name)
            except NoActor:
                return
            time.sleep(0.05)


def _left(until_s: float) -> float:
    return max(0.0, until_s - _MARGIN_S - time.monotonic())


def _told(error: BaseException) -> str:
    """A short form: Ray's own messages have pages."""
    if isinstance(error, Failed):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:400]}"


def main() -> int:
    """Connect, then do requests until standard input ends; 1 where the cluster cannot be joined."""
    # Ray and what it starts may print: the pipe to the gateway carries answers only.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        driver = Driver(json.loads(sys.stdin.readline()), out)
        try:
            driver.connect()
        except Exception as error:  # noqa: BLE001 (reported to the gateway)
            driver.tell(failed=_told(error))
            return 1
        driver.tell(ready=True)
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tide-ray") as pool:
            for line in sys.stdin:
                request = json.loads(line)
                driver.note(request)
                pool.submit(driver.answer, request)
            # Calls in flight have nobody left to answer to.
            threading.Thread(target=_exit_soon, daemon=True).start()
            driver._ray.shutdown()
            os._exit(0)


def _exit_soon() -> None:
    time.sleep(_EXIT_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
