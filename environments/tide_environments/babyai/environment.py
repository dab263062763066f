"""The BabyAI environment, served like any author's: `tide-env serve tide_environments.babyai.environment:BabyAI`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_environments.babyai.game import MAX_TURNS_LIMIT, Game, UnknownLevel
from tide_sdk.environment import Environment, Start, StartInfo, Step
from tide_sdk.errors import TideError
from tide_sdk.wire import Message


class BabyAITask(BaseModel):
    """The task parameters.

    Attributes:
        level: a BabyAI level of MiniGrid.
        max_turns: turns after which the episode is truncated.
        expert: give the shipped bot's next action in the field `expert_action` of each observation message and in
            `info`; it is absent where the bot gave up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: str = "BabyAI-GoToObj-v0"
    max_turns: Annotated[int, Field(ge=1, le=MAX_TURNS_LIMIT)] = 20
    expert: bool = False


class BabyAI(Environment):
    """A BabyAI level in words; the model answers with one action word a turn.

    Reward at the end: 1 - 0.9 * turns / max_turns on success, else 0. A word that is no action costs its turn and is
    told as `unknown`. `info` has `success`, `valid`, and with `expert` the bot's next action.
    """

    name: ClassVar[str] = "babyai"
    capacity: ClassVar[int] = 256
    blocking: ClassVar[bool] = False

    def start(self, task: StartInfo) -> Start:
        """Makes the level; a missing seed is 0.

        Raises:
            TideError: `invalid`, naming the task parameter.
        """
        try:
            asked = BabyAITask.model_validate(task.task)
            self._game = Game(asked.level, task.seed or 0, max_turns=asked.max_turns, expert=asked.expert)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(["task", *(str(part) for part in first["loc"])])
            raise TideError("invalid", f"{field}: {first['msg']}", field=field) from error
        except UnknownLevel as error:
            raise TideError("invalid", f"task.{error}", field="task.level") from error
        return Start([self._message(self._game.text)])

    def step(self, message: Message) -> Step:
        """Plays the message's text as one action word."""
        played = self._game.act(message.text)
        info: dict[str, Any] = {"success": played.success, "valid": played.valid}
        if self._game.expert_action is not None:
            info["expert_action"] = self._game.expert_action
        return Step([self._message(played.text)], played.reward, played.terminated, played.truncated, info)

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "user", "content": text}
        # In the message too, because a first observation has no info; chat templates ignore further fields.
        if self._game.expert_action is not None:
            message["expert_action"] = self._game.expert_action
        return message
