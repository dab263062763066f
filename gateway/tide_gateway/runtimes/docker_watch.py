"""Which containers this process watches, and what happens once one of them is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tide_gateway.runtimes import Channel
from tide_gateway.runtimes.docker_container import State

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Watch:
    """One watched container.

    Attributes:
        name: the instance's name.
        engine: its engine's URL.
        exited: set once it is gone; all servers of this container share it.
        expected: it was asked to stop, so that its end is no news.
        channels: what is to be closed with it.
    """

    name: str
    engine: str
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    expected: bool = False
    channels: list[Channel] = field(default_factory=list[Channel])


class Watches:
    """The watched containers by their id."""

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}

    def add(self, container_id: str, name: str, engine: str) -> Watch:
        """Watch a container; the same watch again where it is watched already."""
        watch = self._watches.get(container_id)
        if watch is None or watch.exited.is_set():
            watch = self._watches[container_id] = Watch(name, engine)
        return watch

    def named(self, name: str) -> list[Watch]:
        """The watches of an instance."""
        return [watch for watch in self._watches.values() if watch.name == name]

    def ids(self, engine: str) -> set[str]:
        """The watched containers of an engine."""
        return {container_id for container_id, watch in self._watches.items() if watch.engine == engine}

    def on_event(self, event: dict[str, Any]) -> None:
        """Read one event of an engine."""
        actor = event.get("Actor") or {}
        container_id = str(actor.get("ID") or event.get("id") or "")
        action = event.get("Action") or event.get("status")
        watch = self._watches.get(container_id)
        if watch is None:
            return
        if action == "oom":
            log.warning("instance %s: a process in its container had used up the memory", watch.name)
            return
        self.end(container_id, f"exit code {(actor.get('Attributes') or {}).get('exitCode', 'unknown')}")

    def end(self, container_id: str, why: str) -> None:
        """The container is gone. Safe to repeat."""
        watch = self._watches.pop(container_id, None)
        if watch is None:
            return
        if not watch.expected:
            log.warning("instance %s: its container is gone (%s)", watch.name, why)
        watch.exited.set()

    def compare(self, watched: Iterable[str], listed: Iterable[dict[str, Any]]) -> None:
        """Find the deaths that no event told of.

        Args:
            watched: the ids that were watched before the list was asked for.
            listed: the engine's containers in whatever state.
        """
        states = {container["Id"]: container.get("State") for container in listed}
        for container_id in watched:
            state = states.get(container_id, "removed")
            if state in ("removed", "exited", "dead", "removing"):
                self.end(container_id, f"found {state} after the engine was away")

    async def drop(self, name: str) -> None:
        """End all watches of an instance and close its channels. Safe to repeat."""
        for container_id, watch in list(self._watches.items()):
            if watch.name == name:
                watch.expected = True
                self.end(container_id, "destroyed")
                for channel in watch.channels:
                    await channel.aclose()

    async def close(self) -> None:
        """Close all channels; the containers live on."""
        watches = list(self._watches.values())
        self._watches.clear()
        for watch in watches:
            for channel in watch.channels:
                await channel.aclose()


@dataclass(frozen=True, slots=True)
class Obituary:
    """What a container left.

    Attributes:
        state: its last state, None where there was no container.
        last_line: the end of its log, "" without one.
        log_path: where its log was kept, "" if nowhere.
        blocked: why its socket could not be used, "" where it could.
    """

    state: State | None = None
    last_line: str = ""
    log_path: str = ""
    blocked: str = ""

    @property
    def exit_words(self) -> str:
        """How it ended, "" where it did not end by itself."""
        if self.state is None or not self.state.is_over:
            return ""
        oom = ", out of memory" if self.state.is_oom else ""
        return f"the container exited with code {self.state.exit_code}{oom}"

    @property
    def last_words(self) -> str:
        """The end of its log and where the rest is."""
        last = f"; its last words: {self.last_line}" if self.last_line else ""
        return f"{last} (log: {self.log_path})" if self.log_path else last
