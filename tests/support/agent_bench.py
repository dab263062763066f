"""Plays one task of an agent over a scripted model and an environment server in this process."""

from __future__ import annotations

from tide_sdk import codec
from tide_sdk.client import GatewayClient
from tide_sdk.http_parse import Response
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import TaskSpec
from tide_sdk.runner import run_task
from tide_sdk.server import EnvironmentServer


class ScriptedModel:
    """Answers with what the script says, the last entry for ever: text or a message."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.bodies: list[dict] = []

    async def request(self, method, path, body=None, *, headers=None, timeout_s=None, idempotent=False):
        self.bodies.append(codec.loads(body))
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        return Response(200, {}, codec.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}))

    async def aclose(self):
        pass


class Bench:
    """One environment server and one model.

    Args:
        asgi: makes a client of an ASGI app.
        environment: the class.
        script: what the model says.
    """

    def __init__(self, asgi, environment, *script) -> None:
        self.http = asgi(EnvironmentServer(environment))
        self.gateway = GatewayClient("http://g", http=self.http)
        self.model = ScriptedModel(*(script or ("0",)))
        self.endpoint = ModelEndpoint("http://m/v1", model="m", sampling={"temperature": 1.0}, http=self.model)

    async def play(self, agent, *, deadline_s=600.0, **options):
        spec = TaskSpec("guess", "k", seed=1, deadline_s=deadline_s)
        return await run_task(agent, spec, self.gateway, self.endpoint, **options)

    async def num_tasks(self) -> int:
        """Tasks that the environment still holds."""
        return (await self.http.call("GET", "/health"))[1]["tasks"]

    def ended(self) -> bool:
        return self.http.calls[-1][1] == "/end"
