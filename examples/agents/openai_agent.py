"""An agent over the official OpenAI client, for any environment that is played in chat messages.

tide-train run examples/quickstart.toml --set agent.entry=agents.openai_agent:play
"""

from openai import NOT_GIVEN, AsyncOpenAI

from tide_sdk import AgentContext, agent

# One for all: a view of it for each task costs .2 ms, a client for each 50 ms. A scheduler may hold a call for long.
client = AsyncOpenAI(base_url="http://each-task-has-its-own", api_key="-", timeout=3600)


@agent
async def play(ctx: AgentContext) -> None:
    """Ask the model, act, until the environment ends the task."""
    model = client.with_options(base_url=ctx.openai_base_url, api_key=ctx.api_key)
    while not ctx.done:
        answer = await model.chat.completions.create(
            model=ctx.model, messages=await ctx.sendable_messages(), tools=ctx.tools or NOT_GIVEN
        )
        await ctx.step(answer.choices[0].message.model_dump(exclude_none=True))
