"""How many tasks of an environment may be in flight, as the gateway says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class EnvironmentState:
    """An environment's capacity: `limit` tasks in flight (None: no limit), and no new one before `blocked_until_s`.

    Of the limit, `reserved_eval` are for evaluation only.
    """

    name: str
    limit: int | None = None
    reserved_eval: int = 0
    num_tasks: int = 0
    num_train: int = 0
    blocked_until_s: float | None = None

    def has_room(self, *, is_eval: bool) -> bool:
        """Whether one more task of the kind may start."""
        if self.blocked_until_s is not None:
            return False
        if self.limit is None:
            return True
        return self.num_tasks < self.limit and (is_eval or self.num_train < self.limit - self.reserved_eval)
