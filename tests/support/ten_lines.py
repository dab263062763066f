"""An agent in ten lines: the same against a gateway alone, in training, and in evaluation."""

from tide_sdk import AgentContext, agent


@agent
async def play(ctx: AgentContext) -> None:
    while not ctx.done:
        reply = await ctx.generate()
        await ctx.step(reply)
