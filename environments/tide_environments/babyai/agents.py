"""Agents for BabyAI: the shipped expert bot as a source of demonstrations."""

from __future__ import annotations

from tide_sdk.agents import agent
from tide_sdk.context import AgentContext


@agent
async def expert(ctx: AgentContext) -> None:
    """Plays what the environment's expert suggests; needs the task parameter `expert = true`.

    Raises:
        LookupError: the last observation holds no suggestion: the bot gave up, or was not asked for.
    """
    while not ctx.done:
        suggestion = ctx.messages[-1].get("expert_action")
        if not suggestion:
            raise LookupError("the observation has no expert_action; start the task with expert = true")
        await ctx.step({"role": "assistant", "content": suggestion})
