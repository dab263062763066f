"""How long a task's context will get, as its siblings and the longer ones of its environment tell."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

_REMEMBERED = 64
_UNKNOWN_FACTOR = 2


class FinalLengths:
    """The final lengths of an environment's latest tasks, and of each open group's finished ones.

    A task that is already longer than most is not expected to be average: only longer ones say how it goes on.
    """

    def __init__(self) -> None:
        self._latest: dict[str, deque[int]] = {}
        self._sorted: dict[str, list[int]] = {}
        self._groups: dict[str, tuple[int, int]] = {}

    def observe(self, environment: str, group: str, tokens: int) -> None:
        """A task ended with a context of so many tokens. O(64)."""
        latest = self._latest.setdefault(environment, deque())
        ordered = self._sorted.setdefault(environment, [])
        if len(latest) == _REMEMBERED:
            ordered.remove(latest.popleft())
        latest.append(tokens)
        insort(ordered, tokens)
        total, count = self._groups.get(group, (0, 0))
        self._groups[group] = (total + tokens, count + 1)

    def forget_group(self, group: str) -> None:
        """The group's last task has left."""
        self._groups.pop(group, None)

    def predicted_tokens(self, environment: str, group: str, tokens: int) -> int:
        """The final length of a task whose context has `tokens` now; at least these. O(64).

        Where nothing has ended yet, twice its present length: pausing is the safety net for what grows further.
        """
        if group in self._groups:
            total, count = self._groups[group]
            return max(tokens, total // count)
        ordered = self._sorted.get(environment)
        if not ordered:
            return _UNKNOWN_FACTOR * tokens
        longer = ordered[bisect_right(ordered, tokens) :]
        return sum(longer) // len(longer) if longer else tokens + tokens // 10
