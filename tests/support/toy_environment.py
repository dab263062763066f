"""A toy environment that a bigram model can learn: say `left`, four times; and its words, its expert, its agents."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from tide_sdk import Environment, Start, Step
from tide_sdk.agents import agent

TURNS = 4


def words():
    """The vocabulary."""
    return ["left", "right", "forward", "turn", "over"]


class Toy(Environment):
    """Reward is the share of turns in which the model said `left`.

    Tasks of the held-out split end no turn before the file `eval_flag` is there.
    """

    name = "toy"
    blocking = False

    num_started = 0

    def __init__(self, delay_s: str = "0", fail_every: str = "0", eval_flag: str = ""):
        self.delay_s, self.flag = float(delay_s), Path(eval_flag) if eval_flag else None
        Toy.num_started += 1
        self.fails = bool(int(fail_every)) and Toy.num_started % int(fail_every) == 0

    def start(self, task):
        self.hits = self.turns = 0
        self.expert = bool(task.task.get("expert"))
        if task.split != "test":
            self.flag = None
        return Start([self.message("turn")])

    async def step(self, message):
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self.turns += 1
        while self.flag and not self.flag.exists():  # noqa: ASYNC110 - the test's process makes it
            await asyncio.sleep(0.02)
        if self.fails:
            raise OSError("the environment broke")
        self.hits += message.text.strip() == "left"
        done = self.turns == TURNS
        reward = self.hits / TURNS if done else None
        return Step([self.message("over" if done else "turn")], reward, terminated=done)

    def message(self, text):
        return {"role": "user", "content": text} | ({"expert_action": "left"} if self.expert else {})


@agent
async def broken(ctx):
    """An agent with a bug."""
    raise ValueError("a bug in the agent")


_played = itertools.count(1)


@agent
async def flaky(ctx):
    """An agent that fails in the middle of one in 20 of its process's tasks, never where `fail_every=20` does."""
    fails = next(_played) % 20 == 7
    while not ctx.done:
        await ctx.step(await ctx.generate())
        if fails:
            raise ValueError("a bug in the agent")
