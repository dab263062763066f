"""Scripted environment servers in this process, for tests and for measuring the gateway alone.

FakeRuntime (a gateway's, dies with it) -> World (what lives on, as containers do) -> ScriptedEnvironment by name
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tide_gateway.runtimes import Gone, LaunchFailed, Place, Server
from tide_gateway.runtimes.scripted import Script, ScriptedEnvironment, ServerDied
from tide_gateway.specs import EnvironmentSpec
from tide_sdk import codec
from tide_sdk.http import ConnectFailed, DeadlineExceeded, Disconnected
from tide_sdk.http_parse import Response
from tide_sdk.wire import HealthResponse

__all__ = ["FakeChannel", "FakeRuntime", "Script", "ScriptedEnvironment", "ServerDied", "World"]


@dataclass(slots=True)
class _Life:
    """One name that exists, from before its server is ready until it is killed.

    Attributes:
        environment: None until it is ready.
        views: every gateway's `Server` of it.
        thawed: set while its processes run.
    """

    environment: ScriptedEnvironment | None = None
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    views: list[Server] = field(default_factory=list[Server])
    thawed: asyncio.Event = field(default_factory=asyncio.Event)


class World:
    """Where fake servers live: it outlives the runtimes on it, as containers outlive a gateway.

    Attributes:
        launched: every environment that ever became ready, by instance name.
        frozen: names whose processes are stopped; changed by `freeze`.
        stuck: names of environments whose servers never become healthy.
    """

    def __init__(self) -> None:
        self.launched: dict[str, ScriptedEnvironment] = {}
        self.frozen: set[str] = set()
        self.stuck: set[str] = set()
        self._lives: dict[str, _Life] = {}

    def names(self) -> set[str]:
        """All that exists, half-launched ones too."""
        return set(self._lives)

    def kill(self, name: str) -> None:
        """End a server with all that it knew; every gateway's `Server` of it sees that. Safe to repeat."""
        life = self._lives.pop(name, None)
        self.frozen.discard(name)
        if life is not None:
            life.dead.set()
            for server in life.views:
                server.exited.set()

    def freeze(self, name: str, frozen: bool) -> None:
        """Stop or continue a server: while it is stopped, its calls hang. Safe to repeat.

        Raises:
            Gone: there is none.
        """
        life = self._lives.get(name)
        if life is None:
            raise Gone(f"there is no fake server {name}")
        if frozen:
            self.frozen.add(name)
            life.thawed.clear()
        else:
            self.frozen.discard(name)
            life.thawed.set()

    def begin(self, name: str) -> asyncio.Event:
        """Bring a name into being, without a server yet; the event is set when it is killed.

        Raises:
            ValueError: the name was used before.
        """
        if name in self._lives or name in self.launched:
            raise ValueError(f"the instance name {name} is used twice")
        life = self._lives[name] = _Life()
        life.thawed.set()
        return life.dead

    def make_ready(self, name: str, capacity: int) -> None:
        """Give a name that exists its server."""
        self.launched[name] = self._lives[name].environment = ScriptedEnvironment(capacity)

    def view(self, name: str) -> Server:
        """A further `Server` for one that lives.

        Raises:
            Gone: there is none.
        """
        life = self._lives.get(name)
        if life is None or life.environment is None:
            raise Gone(f"there is no fake server {name}")
        exited = asyncio.Event()
        channel = FakeChannel(self, name, life.environment, exited, life.thawed)
        server = Server(name, channel, life.environment.health(), Place(f"fake:{name}", host="fake"), exited)
        life.views.append(server)
        return server


class FakeChannel:
    """Calls a `ScriptedEnvironment` in the same process, as if over a network."""

    def __init__(
        self,
        world: World,
        name: str,
        environment: ScriptedEnvironment,
        exited: asyncio.Event,
        thawed: asyncio.Event,
    ) -> None:
        self._world = world
        self._name = name
        self._environment = environment
        self._exited = exited
        self._thawed = thawed

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> Response:
        """Make one call; it fails as a network would where the server is gone or the script says so."""
        if self._exited.is_set():
            raise ConnectFailed("the fake server is gone")
        call = asyncio.ensure_future(self._call(method, path, body))
        gone = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({call, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                if gone.done():
                    raise Disconnected("the fake server is gone")
                raise DeadlineExceeded(f"{method} {path} took longer than {timeout_s} s")
            status, data = call.result()
        except ServerDied as error:
            self._exited.set()
            self._world.kill(self._name)
            raise Disconnected("the fake server died") from error
        except ConnectionResetError as error:
            raise Disconnected("the fake connection broke") from error
        finally:
            call.cancel()
            gone.cancel()
        return Response(status, {}, codec.dumps(data))

    async def _call(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, object]]:
        # The kernel takes the bytes of a call to a stopped process; it is read, and answered, once it runs again.
        await self._thawed.wait()
        answer = await self._environment.handle(method, path, body)
        await self._thawed.wait()
        return answer

    async def aclose(self) -> None:
        """Nothing to close."""


class FakeRuntime:
    """Launches scripted environments in this process.

    Args:
        world: where they live; None makes one that only this runtime knows.

    Attributes:
        world: hand it to the next runtime, and that finds what lives there.
        launched: every environment of the world so far, by instance name.
        servers: what this runtime launched or attached to and did not destroy.
        num_failures: that many launches from now on fail.
        launch_s: seconds that a launch takes.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = World() if world is None else world
        self.launched = self.world.launched
        self.servers: dict[str, Server] = {}
        self.num_failures = 0
        self.launch_s = 0.0

    async def launch(self, name: str, slot: int, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """See `Runtime.launch`."""
        dead = self.world.begin(name)
        try:
            await self._grow(name, spec, dead, timeout_s)
            server = self.world.view(name)
        except BaseException:
            self.world.kill(name)
            raise
        self.servers[name] = server
        return server

    async def _grow(self, name: str, spec: EnvironmentSpec, dead: asyncio.Event, timeout_s: float) -> None:
        launch_s = 1e9 if spec.name in self.world.stuck else self.launch_s
        try:
            async with asyncio.timeout(min(launch_s, timeout_s)):
                await dead.wait()
        except TimeoutError:
            if launch_s > timeout_s:
                raise LaunchFailed(f"the fake server was not healthy within {timeout_s:g} s") from None
        if dead.is_set():
            raise LaunchFailed("the fake server was killed before it was ready")
        if self.num_failures > 0:
            self.num_failures -= 1
            raise LaunchFailed("the fake server fails to launch")
        self.world.make_ready(name, spec.tasks_per_server)

    async def attach(self, name: str, spec: EnvironmentSpec, place: Place, timeout_s: float) -> Server:
        """See `Runtime.attach`."""
        server = self.world.view(name)
        if spec.freeze:
            self.world.freeze(name, False)
        try:
            health = await server.channel.request("GET", "/health", timeout_s=timeout_s)
        except (ConnectFailed, Disconnected, DeadlineExceeded) as error:
            raise Gone(f"the fake server {name} is not healthy: {error}") from error
        server.health = HealthResponse.model_validate_json(health.body)
        self.servers[name] = server
        return server

    async def destroy(self, name: str, spec: EnvironmentSpec | None, place: Place | None, grace_s: float) -> None:
        """See `Runtime.destroy`."""
        self.world.kill(name)
        self.servers.pop(name, None)

    async def survey(self) -> set[str]:
        """See `Runtime.survey`."""
        return self.world.names()

    async def freeze(self, server: Server, frozen: bool) -> None:
        """See `Runtime.freeze`."""
        self.world.freeze(server.name, frozen)

    async def close(self) -> None:
        """Forget the servers; they live on in the world."""
        self.servers.clear()
