"""What an agent sees of its task: one typed context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tide_sdk.client import GatewayClient
from tide_sdk.environment import StartInfo
from tide_sdk.footprints import FootprintReporter
from tide_sdk.model import ModelEndpoint, first_message
from tide_sdk.wire import ObservationResponse, StartResponse


class AgentContext:
    """One task, from the agent's side.

    Attributes:
        task: what was asked for: parameters, seed, split, kind.
        task_id: the task's id at the gateway.
        messages: the conversation so far, OpenAI chat messages; an agent may change it before it generates.
        tools: OpenAI tool definitions that the environment offers.
        turn: the number of the next turn.
        done: True once the environment has ended the task.
        reward: the sum of the turns' rewards so far.
        rewards: the reward of each turn so far, None where the environment gave none.
        observation: the environment's latest answer, None before the first turn.
        completion: the latest completion as the server gave it (usage, finish reason), None before the first.
    """

    def __init__(
        self,
        task: StartInfo,
        started: StartResponse,
        gateway: GatewayClient,
        model: ModelEndpoint,
        reporter: FootprintReporter | None = None,
    ) -> None:
        self.task = task
        self.task_id = started.task_id
        self.messages: list[dict[str, Any]] = [message.as_dict() for message in started.messages]
        self.tools: list[dict[str, Any]] = list(started.tools)
        self.turn = started.turn
        self.done = False
        self.reward = 0.0
        self.rewards: list[float | None] = []
        self.observation: ObservationResponse | None = None
        self.completion: dict[str, Any] | None = None
        self._gateway = gateway
        self._model = model
        self._reporter = reporter
        self._acting = False

    @property
    def openai_base_url(self) -> str:
        """For agents built on an OpenAI client: calls through it belong to this task."""
        return self._model.base_url

    @property
    def api_key(self) -> str:
        """The key that goes with `openai_base_url`."""
        return self._model.api_key

    @property
    def model(self) -> str:
        """The model's name at `openai_base_url`."""
        return self._model.model

    async def generate(self, **sampling: Any) -> dict[str, Any]:
        """Ask the model for the next message; `messages` stays as it is.

        Under a trainer the call may take long: the scheduler holds it until it can be served.

        Args:
            sampling: OpenAI parameters that replace the endpoint's defaults.

        Raises:
            ContextOverflow: the conversation no longer fits; let it pass, the runner knows it.
            ModelRefused: likewise.
            TransportError: likewise.
        """
        self.completion = await self._model.complete(self.messages, self.tools, **sampling)
        return first_message(self.completion)

    async def step(self, reply: Mapping[str, Any] | str) -> ObservationResponse:
        """Give the reply to the environment; appends it and the observation's messages to `messages`.

        Args:
            reply: an assistant message, or its text.

        Raises:
            RuntimeError: the task is done, or another step is under way.
            TideError: the gateway refused or the environment failed; let it pass, the runner knows it.
            TransportError: no answer from the gateway.
        """
        if self.done:
            raise RuntimeError("ctx.step: the task is done; loop with `while not ctx.done`")
        if self._acting:
            raise RuntimeError("ctx.step: another step of this task is under way; await it first")
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else dict(reply)
        self._acting = True
        try:
            observation = await self._gateway.observe(self.task_id, self.turn, message)
        finally:
            self._acting = False
        self.messages.append(message)
        self.messages.extend(item.as_dict() for item in observation.messages)
        self.turn = observation.turn
        self.reward += observation.reward or 0.0
        self.rewards.append(observation.reward)
        self.observation = observation
        self.done = observation.terminated or observation.truncated
        return observation

    async def report(
        self,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int = 0,
        image_tokens: int = 0,
        context_tokens: int | None = None,
    ) -> bool:
        """Report a turn's tokens to the router, for loops with their own engine; `generate` does it by itself.

        Returns:
            True once the report has arrived; False if it was lost or there is no router to tell.
        """
        if self._reporter is None:
            return False
        return await self._reporter.report(
            self.task_id,
            self.turn,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            image_tokens=image_tokens,
            context_tokens=context_tokens,
        )
