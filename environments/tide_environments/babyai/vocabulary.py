"""Every word that the BabyAI environment can say or hear."""

from __future__ import annotations

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
"""The action words, in the order of MiniGrid's action numbers."""

COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
KINDS = ("wall", "door", "key", "ball", "box", "goal", "lava")
DOOR_STATES = ("open", "closed", "locked")

_MISSION_TEXT = "go to the a pick up open put next object in front of you behind on your left right and then after ,"
MISSION_WORDS = tuple(_MISSION_TEXT.split())
PLAIN_WORDS = (".", "nothing", "holding", "unknown", "success", "failure", "timeout")

MAX_AHEAD = 6
"""How many cells the agent sees ahead of itself."""
MAX_SIDE = 3
"""How many cells the agent sees to either side."""


def distance(cells: int, direction: str) -> str:
    """A distance in words, for example `ahead 3`. A side is said with the word that turns to it."""
    return f"{direction} {cells}"


def words() -> tuple[str, ...]:
    """Every word of every observation, mission and action, each once, in a fixed order."""
    numbers = [str(number) for number in range(1, max(MAX_AHEAD, MAX_SIDE) + 1)]
    return tuple(
        dict.fromkeys([*ACTIONS, *COLORS, *KINDS, *DOOR_STATES, *PLAIN_WORDS, *MISSION_WORDS, "ahead", *numbers])
    )
