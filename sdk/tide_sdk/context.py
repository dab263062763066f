"""What an agent sees of its task: one typed context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tide_sdk.client import GatewayClient
from tide_sdk.context_images import ContextImages
from tide_sdk.environment import StartInfo
from tide_sdk.footprints import FootprintReporter
from tide_sdk.image_window import ImageWindow
from tide_sdk.images import url_of
from tide_sdk.model import ModelEndpoint, first_message
from tide_sdk.wire import ObservationResponse, StartResponse


class AgentContext:
    """One task, from the agent's side.

    Attributes:
        task: what was asked for: parameters, seed, split, kind.
        task_id: the task's id at the gateway.
        messages: the conversation so far, OpenAI chat messages; an agent may change it before it generates. Images are
            references in it: `image` reads one, `sendable_messages` is what another client sends.
        image_window: prunes the images of what the model gets; an agent sets another, or None for all images.
        tools: OpenAI tool definitions that the environment offers.
        turn: the number of the next turn.
        done: True once the environment has ended the task.
        reward: the sum of the turns' rewards so far.
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
        self.images = ContextImages(gateway, model)
        self.image_window: ImageWindow | None = ImageWindow()
        self.messages: list[dict[str, Any]] = self.images.take(message.as_dict() for message in started.messages)
        self.tools: list[dict[str, Any]] = list(started.tools)
        self.turn = started.turn
        self.done = False
        self.reward = 0.0
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
        messages = await self.sendable_messages()
        self.completion = await self._model.complete(messages, self.tools, **sampling)
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
        seen = self.images.take(item.as_dict() for item in observation.messages)
        self.messages.extend(seen)
        self.turn = observation.turn
        self.reward += observation.reward or 0.0
        self.observation = observation
        self.done = observation.terminated or observation.truncated
        await self.images.share(seen)
        return observation

    async def sendable_messages(self) -> list[dict[str, Any]]:
        """The conversation as the model's server takes it, for agents with an OpenAI client of their own.

        Images are pruned by `image_window`; what stays is references at a trainer's router, else data URLs.

        Raises:
            ImageUnknown: an image is not to be had any more.
            TideError: the gateway refused an image; let it pass, the runner knows it.
            ModelRefused: the model's server refused one; likewise.
            TransportError: no answer; likewise.
        """
        return await self.images.sendable(self.messages, self.image_window)

    async def image(self, part: Mapping[str, Any]) -> bytes:
        """The bytes of an image part of `messages`: the file as the environment made it.

        Raises:
            ValueError: the part shows no image, or links to one elsewhere.
            ImageUnknown: it is not to be had any more.
            TideError: the gateway refused.
            TransportError: no answer.
        """
        url = url_of(dict(part))
        if url is None:
            raise ValueError("ctx.image: give a part of type image_url")
        return await self.images.bytes_of(url)

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
