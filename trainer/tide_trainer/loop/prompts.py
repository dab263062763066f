"""Where prompts come from: seeds counted up from the first seed of each split, and what is sampled again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tide_trainer.settings_play import TaskSettings
from tide_trainer.types import Prompt


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt that is to be sampled; `sampling` counts how often it was given up before."""

    prompt: Prompt
    sampling: int = 0


class PromptSource:
    """Prompts of the training split, each handed out once, and once more whenever it was put back.

    Args:
        tasks: the configured environment and seeds.
        position: prompts that earlier lives of the run took already.
        again: of these, the ones to be sampled again; they go first.
    """

    def __init__(self, tasks: TaskSettings, position: int = 0, again: Iterable[Draw] = ()) -> None:
        self._tasks = tasks
        self._position = position
        self._again: deque[tuple[int, Draw]] = deque((0, draw) for draw in again)

    @property
    def position(self) -> int:
        """Prompts handed out so far, each counted once."""
        return self._position

    @property
    def num_waiting(self) -> int:
        """Prompts that were put back and not handed out again yet."""
        return len(self._again)

    def take(self, version: int = 0) -> Draw:
        """The next prompt: one that was put back, where the trainer's `version` allows it, else a new one."""
        if self._again and self._again[0][0] <= version:
            return self._again.popleft()[1]
        prompt = prompt_at(self._tasks, "train", self._tasks.train_seed, self._position)
        self._position += 1
        return Draw(prompt)

    def put_back(self, draw: Draw, not_before: int) -> None:
        """Has a prompt handed out again from the trainer's version `not_before` on, which never falls."""
        self._again.append((not_before, draw))


def held_out(tasks: TaskSettings, num: int | None = None) -> tuple[Prompt, ...]:
    """The first `num` (all if None) prompts of the held-out split."""
    count = tasks.num_eval if num is None else min(num, tasks.num_eval)
    return tuple(prompt_at(tasks, "test", tasks.eval_seed, index) for index in range(count))


def demonstrations(tasks: TaskSettings, num: int) -> tuple[Prompt, ...]:
    """The prompts of `num` demonstrations; `task.expert` asks the environment for its expert."""
    prompts = (prompt_at(tasks, "demo", tasks.warm_start_seed, index) for index in range(num))
    return tuple(
        Prompt(prompt.uid, prompt.environment, {**prompt.task, "expert": True}, prompt.seed, prompt.split)
        for prompt in prompts
    )


def prompt_at(tasks: TaskSettings, split: str, first_seed: int, index: int) -> Prompt:
    """The prompt at `index` of a split."""
    return Prompt(
        uid=f"{split}/{index}",
        environment=tasks.environment,
        task=dict(tasks.parameters),
        seed=first_seed + index,
        split=split,
    )
