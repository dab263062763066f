"""Makes sure that an engine has an image that it can run: one pull at a time, and the right architecture."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.docker_engines import Engine
from tide_gateway.runtimes.docker_sdk import EngineRefused, EngineUnreachable
from tide_gateway.specs import DockerOptions

MAX_PULL_S = 3600.0

log = logging.getLogger(__name__)


class PullFailed(LaunchFailed):
    """An image could not be pulled; the next launch tries again."""


class Images:
    """The pulls of one runtime that are under way. Nothing is remembered of those that ended, failed or not."""

    def __init__(self) -> None:
        self._pulls: dict[tuple[str, str, str], asyncio.Task[None]] = {}

    async def ensure(self, engine: Engine, options: DockerOptions) -> None:
        """Make sure that the engine has the image, for a platform that it runs.

        Cancelling one who waits for a pull leaves the pull to the others, and to those who come later.

        Raises:
            LaunchFailed: no such image, not to be pulled, or built for another platform.
            EngineUnreachable: the engine gave no answer.
        """
        wanted = options.platform or await engine.platform()
        if options.pull == "always":
            await self._pull(engine, options)
        found = await _platform_of(engine, options.image)
        if options.pull == "missing" and (found is None or (options.platform and not fits(found, wanted))):
            await self._pull(engine, options)
            found = await _platform_of(engine, options.image)
        if found is None:
            fix = 'build or pull it there, or set pull = "missing"' if options.pull == "never" else "pull it again"
            raise LaunchFailed(f"image {options.image!r} is not on the engine {engine.url}; {fix}")
        if not fits(found, wanted):
            raise LaunchFailed(
                f"image {options.image!r} is built for {found}, but the engine {engine.url} wants {wanted}; build it "
                f'for {wanted}, or set platform = "{found}" where the engine can emulate that'
            )

    async def close(self) -> None:
        """Stop waiting for pulls; engines may go on with them."""
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)

    async def _pull(self, engine: Engine, options: DockerOptions) -> None:
        key = (engine.url, options.image, options.platform)
        pull = self._pulls.get(key)
        if pull is None:
            pull = asyncio.create_task(pull_image(engine, options.image, options.platform), name="tide-pull")
            self._pulls[key] = pull
            pull.add_done_callback(lambda done: self._forget(key, done))
        # The deadline is each waiter's own; the pull's is within.
        await asyncio.shield(pull)

    def _forget(self, key: tuple[str, str, str], pull: asyncio.Task[None]) -> None:
        self._pulls.pop(key, None)
        if not pull.cancelled() and (error := pull.exception()) is not None:
            log.warning("%s", error)  # also where nobody waits for it any more


async def pull_image(engine: Engine, image: str, platform: str) -> None:
    """Let the engine pull an image.

    Raises:
        PullFailed: it could not.
    """
    log.info("engine %s pulls image %s", engine.url, image)

    def pull(client: Any) -> str:
        for step in client.pull(image, stream=True, decode=True, platform=platform or None):
            if "error" in step:
                return str(step["error"])
        return ""

    try:
        words = await engine.run_long(pull, MAX_PULL_S)
    except (EngineRefused, EngineUnreachable) as error:
        words = str(error)
    if words:
        raise PullFailed(f"image {image!r} cannot be pulled on the engine {engine.url}: {words[:500]}")


async def _platform_of(engine: Engine, image: str) -> str | None:
    """What the engine's image is built for, None where it has none."""
    try:
        inspected = await engine.call("inspect_image", image)
    except EngineRefused as error:
        if error.status == 404:
            return None
        raise LaunchFailed(f"image {image!r} cannot be inspected on the engine {engine.url}: {error}") from error
    return platform_in(inspected)


def platform_in(inspected: Mapping[str, Any]) -> str:
    """What an image is built for, from what an engine says of it."""
    variant = f"/{inspected['Variant']}" if inspected.get("Variant") else ""
    return f"{inspected.get('Os', 'linux')}/{inspected.get('Architecture', '')}{variant}"


def fits(found: str, wanted: str) -> bool:
    """Whether they name the same system and architecture, and the same variant where both name one."""
    return all(ours == theirs for ours, theirs in zip(found.split("/"), wanted.split("/"), strict=False))
