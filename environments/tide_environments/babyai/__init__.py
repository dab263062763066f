"""MiniGrid's BabyAI levels, played in words: one action a turn, one word an action."""

from tide_environments.babyai.vocabulary import ACTIONS, words

__all__ = ["ACTIONS", "words"]
