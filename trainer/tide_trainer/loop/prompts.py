"""Where prompts come from: seeds counted up from the first seed of each split."""

from __future__ import annotations

from tide_trainer.settings_play import TaskSettings
from tide_trainer.types import Prompt


class PromptSource:
    """Prompts of the training split, each handed out exactly once.

    Args:
        tasks: the configured environment and seeds.
        position: prompts that earlier runs of the same data order took already.
    """

    def __init__(self, tasks: TaskSettings, position: int = 0) -> None:
        self._tasks = tasks
        self._position = position

    @property
    def position(self) -> int:
        """Prompts handed out so far."""
        return self._position

    def take(self) -> Prompt:
        """The next prompt."""
        prompt = prompt_at(self._tasks, "train", self._tasks.train_seed, self._position)
        self._position += 1
        return prompt


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
