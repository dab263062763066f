"""Ends containers: asks, kills, keeps the log of one that died by itself, removes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from pathlib import Path
from typing import Any

from tide_gateway.runtimes.docker_container import INSTANCE, State
from tide_gateway.runtimes.docker_engines import SLOW_S, Engine
from tide_gateway.runtimes.docker_sdk import EngineRefused
from tide_gateway.runtimes.docker_watch import Obituary, Watch, Watches

MAX_LOG_BYTES = 256 * 1024
_MAX_LINE_CHARS = 300
_POLL_S = 1.0
_BUSY_PAUSE_S = 0.5
_MAX_TRIES = 20

log = logging.getLogger(__name__)


async def inspect(engine: Engine, container: str) -> dict[str, Any] | None:
    """What the engine says about a container, None where there is none.

    Raises:
        EngineUnreachable, EngineRefused: the engine does not say.
    """
    try:
        return await engine.call("inspect_container", container)
    except EngineRefused as error:
        if error.status == 404:
            return None
        raise


async def until_dead(engine: Engine, container: str, watch: Watch) -> None:
    """Return once a container does not run; by events, and by asking while the engine's events do not come."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await watch.exited.wait()
        if watch.exited.is_set():
            return
        if not engine.healthy:
            with contextlib.suppress(OSError):
                found = await inspect(engine, container)
                if found is None or not State.of(found).is_alive:
                    return


async def bury(
    engine: Engine, container: str, log_path: Path, watches: Watches, grace_s: float, *, failed: bool = False
) -> Obituary:
    """Stop a container and remove it with its volumes. Safe to repeat; none is fine.

    Args:
        engine: where it is.
        container: its name.
        log_path: where the log is kept of one that ended by itself or has failed.
        watches: hears of its end.
        grace_s: seconds between asking and killing; 0 kills at once.
        failed: it never became ready.

    Raises:
        EngineUnreachable, EngineRefused: it may be left.
    """
    found = await inspect(engine, container)
    if found is None:
        return Obituary()
    state = State.of(found)
    obituary = Obituary(state)
    if failed or state.is_over:
        obituary = await _keep_log(engine, found["Id"], state, log_path)
    if state.is_alive and grace_s > 0:
        name = found["Config"]["Labels"].get(INSTANCE, container)
        await _ask_to_stop(engine, found["Id"], state, watches.add(found["Id"], name, engine.url), grace_s)
    await remove(engine, found["Id"])
    return obituary


async def remove(engine: Engine, container: str) -> None:
    """Kill and remove a container with its volumes, and wait until it is gone. Safe to repeat.

    Raises:
        EngineUnreachable, EngineRefused: it may be left.
    """
    for number in range(1, _MAX_TRIES + 1):
        try:
            await engine.call("remove_container", container, v=True, force=True, limit_s=SLOW_S)
            return
        except EngineRefused as error:
            if error.status == 404:
                return
            # 409: somebody else removes it; 5xx: a mount is still busy, or a kill has not been heard yet.
            if number == _MAX_TRIES or (error.status != 409 and error.status < 500):
                raise
        await asyncio.sleep(_BUSY_PAUSE_S)


async def _ask_to_stop(engine: Engine, container_id: str, state: State, watch: Watch, grace_s: float) -> None:
    watch.expected = True
    try:
        await engine.call("kill", container_id, signal="SIGTERM")
        if state.is_frozen:
            with contextlib.suppress(EngineRefused):  # some engines thaw what they send a signal to
                await engine.call("unpause", container_id)
    except EngineRefused as error:
        log.debug("container %s: %s", container_id, error)  # it ended by itself meanwhile
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await until_dead(engine, container_id, watch)


async def _keep_log(engine: Engine, container_id: str, state: State, log_path: Path) -> Obituary:
    def read(client: Any) -> bytes:
        kept: deque[bytes] = deque()
        num_bytes = 0
        for chunk in client.logs(container_id, stdout=True, stderr=True, stream=True, follow=False, tail=2000):
            kept.append(chunk[-MAX_LOG_BYTES:])
            num_bytes += len(kept[-1])
            while num_bytes > MAX_LOG_BYTES and len(kept) > 1:
                num_bytes -= len(kept.popleft())
        return b"".join(kept)

    try:
        text = await engine.run(read, SLOW_S)
    except EngineRefused as error:
        if error.status not in (404, 409):  # those mean that somebody else removes it just now
            log.warning("the log of container %s cannot be read: %s", container_id, error)
        return Obituary(state)
    return _obituary(state, text, log_path) if text else Obituary(state)


def _obituary(state: State, text: bytes, log_path: Path) -> Obituary:
    kept = str(log_path)
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(text)
    except OSError as error:
        log.warning("the log %s cannot be written: %s", log_path, error)
        kept = ""
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    last = re.sub(r"[\x00-\x1f\x7f]", " ", lines[-1]).strip()[:_MAX_LINE_CHARS] if lines else ""
    return Obituary(state, last, kept)
