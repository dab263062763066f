"""An agent of the framework pydantic-ai, for environments that are played in plain text.

tide-train run examples/quickstart.toml --set agent.entry=agents.pydantic_ai_agent:play
"""

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tide_sdk import AgentContext, agent

# One for all: a view of it for each task costs 1 ms, a client for each 50 ms. A scheduler may hold a call for long.
client = AsyncOpenAI(base_url="http://each-task-has-its-own", api_key="-", timeout=3600)
player = Agent(output_type=str | None)  # a model that learns may say nothing


@agent
async def play(ctx: AgentContext) -> None:
    """Give each observation to the framework's agent, and its answer to the environment."""
    own = client.with_options(base_url=ctx.openai_base_url, api_key=ctx.api_key)
    model = OpenAIChatModel(ctx.model, provider=OpenAIProvider(openai_client=own))
    history: list[ModelMessage] = []
    while not ctx.done:
        seen = str(ctx.messages[-1]["content"])
        result = await player.run(seen, model=model, message_history=history)
        history = result.all_messages()
        await ctx.step(result.output or "")
