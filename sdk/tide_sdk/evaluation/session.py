"""One session of `tide-env eval`: reaches everything, plays what is missing, writes the report whatever happens."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tide_sdk.agents import Agent, AgentResult
from tide_sdk.client import GatewayClient
from tide_sdk.context import AgentContext
from tide_sdk.context_images import without_bytes
from tide_sdk.evaluation.carry_out import carry_out
from tide_sdk.evaluation.folder import MANIFEST, EvaluationFolder, read_manifest
from tide_sdk.evaluation.records import Play, Record, record_of
from tide_sdk.evaluation.report import finish
from tide_sdk.evaluation.summary import Summary
from tide_sdk.evaluation.tasks import EvaluationTask, digest
from tide_sdk.many import NotReady, Progress, reach_model, run_attempts
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import TaskSpec
from tide_sdk.place import Place, reached
from tide_sdk.settings import gateway_token

_ATTEMPTS_OF_A_SESSION = 1000
"""The attempts of a session are numbered above those of all before it, so that a task which a killed one left ends."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What `tide-env eval` was told; see its help."""

    place: Place
    agent: Agent
    agent_name: str
    model_url: str
    model: str
    api_key: str = field(repr=False)
    sampling: Mapping[str, Any]
    tasks: Sequence[EvaluationTask]
    repeats: int
    threshold: float
    concurrency: int
    attempts: int
    task_timeout_s: float
    call_timeout_s: float
    keep_messages: bool
    out: Path
    resume: bool
    moved: bool

    def definition(self, environment: str, model: str) -> dict[str, Any]:
        """Everything that decides what the results mean."""
        return {
            "environment": environment,
            "served": self.place.served,
            "options": list(self.place.options),
            "gateway": self.place.url,
            "agent": self.agent_name,
            "model": model,
            "model_url": self.model_url,
            "sampling": dict(self.sampling),
            "tasks": {"num": len(self.tasks), "sha256": digest(self.tasks)},
            "repeats": self.repeats,
            "threshold": self.threshold,
            "task_timeout_s": self.task_timeout_s,
            "call_timeout_s": self.call_timeout_s,
        }


async def evaluate(settings: Settings) -> tuple[Summary, str | None]:
    """Evaluate; the summary, and why it stopped early (None if it did not).

    Cancelling ends the tasks that run at the gateway, and leaves a report of what there is.

    Raises:
        NotReady: something that is needed does not answer; nothing was played.
        EvaluationFailed: the folder cannot be used or written.
    """
    try:
        model = ModelEndpoint(
            settings.model_url,
            model=settings.model,
            api_key=settings.api_key,
            sampling=settings.sampling,
            timeout_s=settings.call_timeout_s,
        )
    except ValueError as error:
        raise NotReady(f"--model-url {error}") from error
    async with model:
        # First, for it takes a moment and nothing has to be started.
        model.model = _model_name(settings.model, await reach_model(model), settings.model_url)
        token, num = gateway_token(), settings.concurrency
        async with reached(settings.place, token, num, references=True) as (gateway, environment):
            with _folder(settings, environment, model.model) as folder:
                try:
                    stopped = await _play(settings, folder, gateway, model, environment)
                finally:
                    # Not in a thread: a second Ctrl-C would leave it running behind the loop.
                    summary = finish(settings.out)
    return summary, stopped


def _folder(settings: Settings, environment: str, model: str) -> EvaluationFolder:
    definition = settings.definition(environment, model)
    places = {"gateway": settings.place.url, "model_url": settings.model_url}
    if settings.moved and (settings.out / MANIFEST).is_file():
        before = read_manifest(settings.out)["definition"]
        definition |= {name: before.get(name) for name in places}
    return EvaluationFolder(settings.out, definition, resume=settings.resume, places=places)


async def _play(
    settings: Settings, folder: EvaluationFolder, gateway: GatewayClient, model: ModelEndpoint, environment: str
) -> str | None:
    plays = [Play(task, repeat) for repeat in range(settings.repeats) for task in settings.tasks]

    async def one(play: Play) -> Record:
        watched = Watched(settings.agent)
        began_s = time.monotonic()
        spec = TaskSpec(
            environment,
            f"{folder.key}/{play.task.id}/{play.repeat}",
            task=play.task.task,
            seed=play.task.seed,
            split=play.task.split,
            kind="eval",
            attempt=(folder.session - 1) * _ATTEMPTS_OF_A_SESSION,
            deadline_s=settings.task_timeout_s,
        )
        result, attempts = await run_attempts(watched.agent, spec, gateway, model, attempts=settings.attempts)
        messages = watched.messages if settings.keep_messages else ()
        return record_of(play, result, attempts=attempts, wall_s=time.monotonic() - began_s, messages=messages)

    done = len(plays) - len(folder.missing(plays))
    progress = Progress(len(plays), sys.stderr, num_done=done)
    return await carry_out(folder, plays, one, concurrency=settings.concurrency, progress=progress)


class Watched:
    """An agent whose conversation can be read when it is over.

    Attributes:
        agent: plays as the given one does.
        messages: of the last attempt, as far as it came.
    """

    def __init__(self, agent: Agent) -> None:
        self.messages: list[dict[str, Any]] = []
        self._agent = agent
        self.agent = dataclasses.replace(agent, function=self._play)

    async def _play(self, ctx: AgentContext) -> AgentResult:
        try:
            return await self._agent(ctx)
        finally:
            self.messages = without_bytes(ctx.messages)


def _model_name(given: str, listed: Sequence[str], url: str) -> str:
    if given:
        return given
    if len(listed) == 1:
        return listed[0]
    has = ", ".join(listed[:20]) or "no list of models"
    raise NotReady(f"which model? {url} has {has}; name one with --model")
