"""Limits of the decorator become outcomes; an agent's own tools are the model's and not the environment's."""

from __future__ import annotations

import asyncio
from typing import Literal

import numpy
import pytest
from agent_bench import Bench

from tide_sdk.agents import AgentResult, agent
from tide_sdk.metrics import MAX_METRICS_BYTES


@pytest.fixture
def bench(asgi, guess_class):
    return lambda *script: Bench(asgi, guess_class, *script)


async def test_the_limit_of_turns_ends_the_loop_and_truncates_the_task(bench):
    @agent(max_turns=2)
    async def play(ctx):
        while not ctx.done:
            await ctx.step(await ctx.generate())
        assert ctx.limit == "max_turns 2"

    place = bench("0")
    result = await place.play(play)
    assert (result.outcome, result.reward, result.turns, result.error) == ("truncated", 0.0, 2, None)
    assert b"max_turns 2" in place.http.calls[-1][2]


@pytest.mark.parametrize("call", ["generate", "step", "report", "run_tools"])
async def test_going_on_beyond_the_limit_truncates_too(call, bench):
    @agent(max_turns=1)
    async def play(ctx):
        await ctx.step("0")
        await {
            "generate": lambda: ctx.generate(),
            "step": lambda: ctx.step("0"),
            "report": lambda: ctx.report(prompt_tokens=1, completion_tokens=1),
            "run_tools": lambda: ctx.run_tools({}),
        }[call]()

    result = await bench().play(play)
    assert (result.outcome, result.reward, result.turns) == ("truncated", 0.0, 1)
    assert "while not ctx.done" in result.error


async def test_a_limit_that_the_environment_reaches_first_is_none(bench):
    @agent(max_turns=1)
    async def play(ctx):
        await ctx.step(await ctx.generate())
        assert (ctx.done, ctx.limit) == (True, None)

    result = await bench("3").play(play)
    assert (result.outcome, result.reward) == ("completed", 1.0)


async def test_the_smaller_deadline_counts(bench):
    @agent(deadline_s=0.02)
    async def play(ctx):
        await asyncio.Event().wait()

    result = await bench().play(play)
    assert (result.outcome, result.error) == ("truncated", "DeadlinePassed: the task took longer than 0.02 s")


async def test_sampling_of_the_call_goes_before_the_agents_and_the_endpoints(bench):
    @agent(sampling={"temperature": 0.5, "max_tokens": 9})
    async def play(ctx):
        await ctx.generate(max_tokens=3)

    place = bench()
    await place.play(play)
    assert (place.model.bodies[0]["temperature"], place.model.bodies[0]["max_tokens"]) == (0.5, 3)


def calls(*given):
    made = [
        {"id": str(n), "type": "function", "function": {"name": name, "arguments": text}}
        for n, (name, text) in enumerate(given)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


async def test_own_tools_are_offered_run_and_answered(bench):
    @agent
    async def play(ctx):
        def look(where: Literal["left", "right"], how_often: int = 1) -> dict:
            """Look around.

            Not told to the model.
            """
            return {"seen": [where] * how_often}

        ctx.add_tool(look)
        ctx.add_tool(lambda **given: "ok", name="free", parameters={"type": "object"})
        offered = {tool["function"]["name"]: tool["function"] for tool in ctx.tools}
        assert set(offered) == {"guess", "look", "free"}
        assert offered["look"]["description"] == "Look around."
        assert offered["look"]["parameters"]["properties"]["where"]["enum"] == ["left", "right"]
        assert offered["look"]["parameters"]["required"] == ["where"]
        for wrong, words in [({"name": "guess"}, "already"), ({"name": "a b"}, "name"), ({}, "already")]:
            with pytest.raises(ValueError, match=words):
                ctx.add_tool(look, **wrong)
        with pytest.raises(TypeError, match="have names"):
            ctx.add_tool(lambda *args: None, name="stars")

        asked = [("look", '{"where": "left", "how_often": 2}'), ("look", '{"where": "up"}'), ("look", "nonsense")]
        asked += [("look", "[]"), ("free", '{"x": 1}'), ("guess", "{}")]
        before = len(ctx.messages)
        assert await ctx.run_tools(calls(*asked))
        reply, *answers = ctx.messages[before:]
        assert reply["tool_calls"][0]["id"] == "0"
        assert [answer["tool_call_id"] for answer in answers] == list("012345")
        assert answers[0]["content"] == '{"seen":["left","left"]}'
        assert "where" in answers[1]["content"]
        assert all(answer["content"].startswith("error: ") for answer in answers[1:4])
        assert answers[4]["content"] == "ok"
        assert answers[5]["content"].startswith("not_run"), "the environment's tools are called on their own"
        assert not await ctx.run_tools(calls(("guess", "{}")))
        assert not await ctx.run_tools({"role": "assistant", "content": "3"})
        await ctx.step("3")

    result = await bench().play(play)
    assert (result.outcome, result.error) == ("completed", None)


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, 1.0),
        (numpy.float32(0.5), 0.5),
        (numpy.array(0.25), 0.25),
        (AgentResult(reward=True), 1.0),
        (AgentResult(reward=numpy.float64(0.5)), 0.5),
    ],
)
async def test_any_real_number_is_a_reward(returned, reward, bench):
    @agent
    async def play(ctx):
        return returned

    result = await bench().play(play)
    assert (result.outcome, result.reward, type(result.reward)) == ("completed", reward, float)


@pytest.mark.parametrize(
    "returned",
    [
        *(True, numpy.bool_(True), "1.0", 1j, numpy.array([1, 2]), [1.0], float("nan")),
        *(AgentResult(reward="1"), AgentResult(reward=float("-inf")), AgentResult(metrics=[])),
    ],
)
async def test_what_is_no_finite_real_number_is_the_agents_error(returned, bench):
    @agent
    async def play(ctx):
        return returned

    result = await bench().play(play)
    assert (result.outcome, result.reward) == ("agent_error", None)


async def test_metrics_that_are_not_json_are_left_out_and_named_and_the_reward_counts(bench):
    @agent
    async def play(ctx):
        good = {"steps": numpy.int64(3), "loss": numpy.float32(0.5), "ok": numpy.bool_(True), "list": (1, {"a": None})}
        bad = {"nan": float("nan"), "deep": {"inf": [float("inf")]}, "thing": object(), 3: 1, "big": 2**70}
        return AgentResult(0.5, good | bad)

    result = await bench().play(play)
    assert (result.outcome, result.reward) == ("completed", 0.5)
    assert result.metrics == {"steps": 3, "loss": 0.5, "ok": True, "list": [1, {"a": None}]}
    assert type(result.metrics["steps"]) is int
    for words in ("nan is nan", "deep.inf[0] is inf", "thing is a object", "the name 3"):
        assert words in result.error

    @agent
    async def large(ctx):
        return AgentResult(0.5, {"text": "x" * MAX_METRICS_BYTES})

    result = await bench().play(large)
    assert (result.reward, result.metrics) == (0.5, {})
    assert "bytes" in result.error
