"""What an agent sees of its task: one typed context."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeVar

from tide_sdk.cleanup import Cleanups, closing, entered
from tide_sdk.client import GatewayClient
from tide_sdk.context_images import ContextImages, ImageContext
from tide_sdk.environment import StartInfo
from tide_sdk.errors import StoppedEarly
from tide_sdk.footprints import FootprintReporter
from tide_sdk.local_tools import LocalTools, tool_message
from tide_sdk.model import ModelEndpoint, first_message
from tide_sdk.wire import ObservationResponse, StartResponse

T = TypeVar("T")


class LimitReached(StoppedEarly):
    """The agent goes on although its limit is reached; the task is truncated."""


class AgentContext(ImageContext):
    """One task, from the agent's side.

    Attributes:
        task: what was asked for: parameters, seed, split, kind.
        task_id: the task's id at the gateway.
        messages: the conversation so far, OpenAI chat messages; an agent may change it before it generates.
        tools: OpenAI tool definitions that the model is offered: the environment's, then those of `add_tool`.
        turn: the number of the next turn.
        done: True once the environment has ended the task, a limit has, or the agent is over.
        ended: True once the environment has ended the task.
        limit: the agent's limit that has ended its play, None before.
        reward: the sum of the turns' rewards so far.
        rewards: the reward of each turn so far, None where the environment gave none.
        observation: the environment's latest answer, None before the first turn.
        completion: the latest completion as the server gave it (usage, finish reason), None before the first.
        cleanups: what the runner closes at the end.
        local_tools: the agent's own tools.
    """

    def __init__(
        self,
        task: StartInfo,
        started: StartResponse,
        gateway: GatewayClient,
        model: ModelEndpoint,
        reporter: FootprintReporter | None = None,
        *,
        report_as: str | None = None,
        max_turns: int | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Made by the runner.

        Args:
            task: what was asked for.
            started: the gateway's answer to it.
            gateway: where steps go.
            model: where `generate` goes.
            reporter: where `report` goes.
            report_as: the task's name there; None takes its id at the gateway.
            max_turns: turns after which the play is over.
            sampling: defaults of `generate`, over the endpoint's.
        """
        self.task, self.task_id, self.turn = task, started.task_id, started.turn
        self.images = ContextImages(gateway, model)
        self.messages: list[dict[str, Any]] = self.images.take(message.as_dict() for message in started.messages)
        self.tools: list[dict[str, Any]] = list(started.tools)
        self.done = False
        self.limit: str | None = None
        self.reward = 0.0
        self.rewards: list[float | None] = []
        self.observation: ObservationResponse | None = None
        self.completion: dict[str, Any] | None = None
        self._gateway, self._acting = gateway, False
        self._model, self._reporter = model, reporter
        self._report_as = report_as or started.task_id
        self._max_turns, self._sampling = max_turns, dict(sampling or {})
        self.cleanups, self.local_tools = Cleanups(), LocalTools()
        self.ended = self._left = False

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
            RequestInvalid: the server says that the request is wrong, for example a sampling parameter.
            LimitReached: the agent's own limit has ended its play.
            TransportError: no answer, or a failed server; let it pass.
        """
        await self._check("generate")
        messages = await self.sendable_messages()
        self.completion = await self._model.complete(messages, self.tools, **(self._sampling | sampling))
        return first_message(self.completion)

    async def step(self, reply: Mapping[str, Any] | str) -> ObservationResponse:
        """Give the reply to the environment; appends it and the observation's messages to `messages`.

        Args:
            reply: an assistant message, or its text.

        Raises:
            RuntimeError: the task is done, or another step is under way.
            LimitReached: the agent's own limit has ended its play.
            TideError: the gateway refused or the environment failed; let it pass, the runner knows it.
            TransportError: no answer from the gateway.
        """
        await self._check("step")
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
        self.messages += [message, *self.images.take(item.as_dict() for item in observation.messages)]
        self.turn = observation.turn
        self.reward += observation.reward or 0.0
        self.rewards.append(observation.reward)
        self.observation = observation
        self.done = self.ended = observation.terminated or observation.truncated
        if not self.done and self._max_turns is not None and self.turn >= self._max_turns:
            self.done, self.limit = True, f"max_turns {self._max_turns}"
        await self.images.offer(self.messages)
        return observation

    def add_tool(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Offer the model a tool of the agent's own, which `run_tools` runs; the environment never sees its calls.

        Args:
            function: plain or async; its annotated parameters are the tool's, and what it returns is told to the model.
            name: the function's if None.
            description: the docstring's first paragraph if None.
            parameters: the JSON Schema of its arguments; None makes it of the annotations.

        Raises:
            ValueError: the name is taken, or no tool's name.
            TypeError: an annotation that has no schema.
        """
        taken = {str(tool.get("function", {}).get("name")) for tool in self.tools}
        self.tools.append(self.local_tools.add(function, name, description, parameters, taken))

    async def run_tools(self, reply: Mapping[str, Any]) -> bool:
        """Run the calls of the agent's own tools in a reply, in order.

        Appends the reply and a message for each of its calls to `messages`. Calls of the environment's tools beside
        them are answered `not_run`: the model asks again in its next reply.

        Returns:
            True if there were such calls, so that the model must be asked again; False for a reply that `step` takes.
        """
        await self._check("run_tools")
        answers: list[tuple[str, Any]] = []
        for call_id, run in self.local_tools.plan(reply):
            result = run()
            answers.append((call_id, await result if inspect.isawaitable(result) else result))
        return self.tools_ran(reply, answers)

    def tools_ran(self, reply: Mapping[str, Any], answers: Sequence[tuple[str, Any]]) -> bool:
        """Append the reply and what its tools gave, by the calls' ids; False if there is nothing. For `run_tools`."""
        if answers:
            self.messages.extend([dict(reply), *(tool_message(*answer) for answer in answers)])
        return bool(answers)

    def on_end(self, function: Callable[[], Any]) -> None:
        """Have a callable without arguments, plain or async, called when the task ends, in whatever way.

        The latest goes first. Each may take 30 s; one that fails is told in the result's `cleanup_errors`.
        """
        self.cleanups.push(*closing(function))

    async def enter(self, manager: AbstractAsyncContextManager[T] | AbstractContextManager[T]) -> T:
        """Enter a context manager and have it left when the task ends, in whatever way; see `on_end`."""
        value, name, close = await entered(manager)
        self.cleanups.push(name, close)
        return value

    async def report(
        self,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int = 0,
        image_tokens: int = 0,
        context_tokens: int | None = None,
        growth_tokens: int | None = None,
        hold: bool = True,
    ) -> bool:
        """Report a turn's tokens to the router, for loops with their own engine; `generate` does it by itself.

        Under a trainer this is where such a loop waits for its turn: the scheduler pauses the task and holds the answer
        until the task may go on. Other tasks do not wait for it. Where the task's calls go through the router as
        well, the router's own measure counts, only `growth_tokens` is taken, and nothing waits.

        Args:
            prompt_tokens: tokens of the prompt, cached ones included.
            completion_tokens: tokens that the model wrote.
            cached_tokens: prompt tokens that the engine's cache held.
            image_tokens: prompt tokens that stand for images.
            context_tokens: tokens that the next prompt will at least have; None takes prompt and completion together.
            growth_tokens: tokens by which the context is expected still to grow until the task ends; None leaves
                that to the scheduler.
            hold: False reports without waiting for more than the report's arrival.

        Returns:
            True once the report has arrived; False if it was lost, was refused, or there is no router to tell.

        Raises:
            ContextOverflow: the context fits no rank of the trainer; let it pass.
            ModelStopped: the task is over; let it pass.
            ValueError: numbers that cannot be.
        """
        await self._check("report")
        if self._reporter is None:
            return False
        return await self._reporter.report(
            self._report_as,
            self.turn,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            image_tokens=image_tokens,
            context_tokens=context_tokens,
            growth_tokens=growth_tokens,
            hold=hold,
        )

    def leave(self) -> None:
        """The play is over: what the agent left running can ask for nothing any more. For the runner."""
        self.done = self._left = True

    async def _check(self, call: str) -> None:
        if self._left:
            await asyncio.sleep(0)  # a loop that asks again and again must not keep the event loop
            raise RuntimeError(f"ctx.{call}: the agent has returned; await what it started before that")
        if self.limit is not None:
            raise LimitReached(
                f"ctx.{call}: the agent's limit is reached ({self.limit}); loop with `while not ctx.done`"
            )
