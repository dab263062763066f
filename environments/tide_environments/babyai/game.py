"""A BabyAI level played in words: seed -> text, action word -> text. No network, no SDK.

game = Game("BabyAI-GoToObj-v0", seed=7)
game.text                      # go to the red ball . red ball ahead 3
game.act("forward")            # Played(text="red ball ahead 2", reward=0.0, ...)
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import gymnasium
import minigrid  # noqa: F401  (registers the levels)
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT
from minigrid.utils.baby_ai_bot import BabyAIBot

from tide_environments.babyai.vocabulary import ACTIONS, DOOR_STATES, MAX_AHEAD, MAX_SIDE, distance

_ACTION_NUMBERS = {word: number for number, word in enumerate(ACTIONS)}
_INVISIBLE = {"unseen", "empty", "floor", "wall", "agent"}
MAX_TURNS_LIMIT = 1000


class UnknownLevel(ValueError):
    """The level's name is not one of MiniGrid's BabyAI levels."""


@dataclass(frozen=True, slots=True)
class Played:
    """What one action led to.

    Attributes:
        text: what the agent sees now, in words.
        reward: 1 - 0.9 * turns / max_turns on success, else 0.
        terminated: the mission succeeded or can no longer succeed.
        truncated: the turns are used up.
        success: the mission succeeded.
        valid: the word was an action; another word costs the turn and changes nothing.
    """

    text: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    valid: bool


def levels() -> tuple[str, ...]:
    """The names of all BabyAI levels that MiniGrid ships."""
    return tuple(sorted(name for name in gymnasium.registry if name.startswith("BabyAI-")))


class Game:
    """One episode. The same level and seed give the same episode for the same actions.

    Args:
        level: a name of `levels()`.
        seed: the episode's seed, 0 or more.
        max_turns: turns after which the episode is truncated, 1 to 1000.
        expert: ask MiniGrid's bot for its next action (`expert_action`).

    Raises:
        UnknownLevel: no such level.
        ValueError: max_turns is out of its range.
    """

    def __init__(self, level: str, seed: int, *, max_turns: int = 20, expert: bool = False) -> None:
        if not level.startswith("BabyAI-") or level not in gymnasium.registry:
            raise UnknownLevel(f"level: {level!r} is no BabyAI level; for example 'BabyAI-GoToObj-v0'")
        if not 1 <= max_turns <= MAX_TURNS_LIMIT:
            raise ValueError(f"max_turns: {max_turns} is not between 1 and {MAX_TURNS_LIMIT}")
        self.max_turns = max_turns
        self.turns = 0
        self._level: Any = gymnasium.make(level, disable_env_checker=True).unwrapped
        # The levels print every rejected sample.
        with contextlib.redirect_stdout(io.StringIO()):
            seen, _ = self._level.reset(seed=seed)
        self.mission = str(self._level.mission).lower().replace(",", " ,")
        self.text = f"{self.mission} . {self._describe(seen['image'])}"
        self._asked_expert = expert
        self._bot: Any = BabyAIBot(self._level) if expert else None
        self.expert_action: str | None = None
        self._ask_expert(None)

    def act(self, word: str) -> Played:
        """Plays one action word. The caller stops after a terminated or truncated answer."""
        self.turns += 1
        number = _ACTION_NUMBERS.get(word.strip().lower())
        out_of_turns = self.turns >= self.max_turns
        if number is None:
            text = "unknown . " + ("timeout" if out_of_turns else self._describe(self._level.gen_obs()["image"]))
            return Played(text, 0.0, False, out_of_turns, False, False)
        seen, level_reward, terminated, cut, _ = self._level.step(number)
        success = bool(terminated and level_reward > 0)
        truncated = bool(not terminated and (cut or out_of_turns))
        if terminated or truncated:
            self.expert_action = None
            text = "success" if success else "failure" if terminated else "timeout"
        else:
            self._ask_expert(number)
            text = self._describe(seen["image"])
        reward = 1.0 - 0.9 * self.turns / self.max_turns if success else 0.0
        return Played(text, reward, bool(terminated), truncated, success, True)

    def _describe(self, image: Any) -> str:
        """The agent's view (MiniGrid's [7, 7, 3] code, agent at the bottom's middle) in words, nearest first."""
        found: list[tuple[int, int, str]] = []
        for column in range(2 * MAX_SIDE + 1):
            for row in range(MAX_AHEAD + 1):
                kind = IDX_TO_OBJECT[int(image[column, row, 0])]
                ahead, right = MAX_AHEAD - row, column - MAX_SIDE
                # Of the walls only one that blocks the way is worth its words.
                if kind in _INVISIBLE and not (kind == "wall" and (ahead, right) == (1, 0)):
                    continue
                found.append((ahead + abs(right), right, _name(image[column, row], kind, ahead, right)))
        return " ".join(text for _, _, text in sorted(found)) or "nothing"

    def _ask_expert(self, taken: int | None) -> None:
        if self._bot is None:
            return
        try:
            planned = self._bot.replan(taken)
        # The bot fails by assertion, its own exceptions and index errors on states that it did not plan for.
        except Exception:  # noqa: BLE001
            self._bot = None
            self.expert_action = None
            return
        self.expert_action = ACTIONS[int(planned)]

    @property
    def expert_failed(self) -> bool:
        """True where an expert was asked for and gave up; `expert_action` is then None."""
        return self._asked_expert and self._bot is None


def _name(cell: Any, kind: str, ahead: int, right: int) -> str:
    parts: list[str] = []
    if (ahead, right) == (0, 0):
        parts.append("holding")
    if kind == "door":
        parts.append(DOOR_STATES[int(cell[2])])
    if kind != "wall":
        parts.append(IDX_TO_COLOR[int(cell[1])])
    parts.append(kind)
    if ahead:
        parts.append(distance(ahead, "ahead"))
    if right:
        parts.append(distance(abs(right), "right" if right > 0 else "left"))
    return " ".join(parts)
