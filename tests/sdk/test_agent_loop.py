"""The agent loop over a fake model server and a real environment server: every ending becomes a result."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk import codec
from tide_sdk.agents import Agent, AgentResult, agent, chat_agent
from tide_sdk.client import GatewayClient
from tide_sdk.environment import EndInfo, Environment, Start
from tide_sdk.errors import TideError
from tide_sdk.http import Disconnected
from tide_sdk.http_parse import Response
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import TaskSpec
from tide_sdk.runner import run_task, run_tasks
from tide_sdk.server import EnvironmentServer

SPEC = TaskSpec("guess", "k", seed=1)


class FakeModel:
    """A router that answers from a script, the last one for ever: text, a message, (status, body) or an exception."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.requests: list[tuple[str, dict, dict]] = []

    async def request(self, method, path, body=None, *, headers=None, timeout_s=None, idempotent=False):
        self.requests.append((path, codec.loads(body), dict(headers or {})))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, tuple):
            return Response(answer[0], {}, codec.dumps(answer[1]))
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer, "tool_calls": []}
        return Response(200, {}, codec.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}))

    async def aclose(self):
        pass


@pytest.fixture
def play(asgi, guess_class, clock):
    """Run one task: (result, the model, the environment server)."""

    async def run(*script, player: Agent = chat_agent, environment=guess_class, spec=SPEC, **options):
        http = asgi(EnvironmentServer(environment, now=clock))
        gateway = GatewayClient("http://g", http=http, now=clock, sleep=clock.sleep)
        model = FakeModel(*script)
        endpoint = ModelEndpoint(
            "http://m/v1", model="m", api_key="key", sampling={"temperature": 0.5}, http=model, sleep=clock.sleep
        )
        result = await run_task(player, spec, gateway, endpoint, **options)
        assert (await http.call("GET", "/health"))[1]["tasks"] == 0, "the task was not ended"
        return result, model, http

    return run


async def test_the_default_agent_plays_to_the_end(play):
    result, model, http = await play("0", "3")
    assert (result.outcome, result.reward, result.turns, result.error) == ("completed", 1.0, 2, None)
    path, body, headers = model.requests[1]
    assert path == "/v1/chat/completions"
    assert headers == {"Authorization": "Bearer key"}
    assert body["temperature"] == 0.5
    assert body["tools"] == [{"type": "function", "function": {"name": "guess"}}]
    assert [message["content"] for message in body["messages"]] == ["Guess my number.", "0", "No."]
    assert body["messages"][1] == {"role": "assistant", "content": "0"}
    assert codec.loads(http.calls[1][2])["message"] == {"role": "assistant", "content": "0"}


async def test_a_truncated_task_says_so(play):
    result, _, _ = await play("0")
    assert (result.outcome, result.reward, result.turns) == ("truncated", 0.0, 3)


OVERFLOW = (400, {"error": {"code": "context_length_exceeded", "message": "too long", "type": "invalid_request_error"}})


@pytest.mark.parametrize(
    ("answer", "outcome", "reward", "words"),
    [
        (OVERFLOW, "context_overflow", 0.0, "too long"),
        ((400, {"error": {"code": "x", "message": "bad tools"}}), "agent_error", None, "bad tools"),
        ((400, {"error": {"code": "content_filter", "message": "not this"}}), "model_refused", 0.0, "not this"),
        ((404, {"error": {"message": "no such model"}}), "infrastructure", None, "no such model"),
        ({"role": "assistant", "content": None, "refusal": "I will not"}, "model_refused", 0.0, "I will not"),
        ((410, {"detail": "dropped"}), "aborted", None, "dropped"),
        ((401, {"detail": "key"}), "infrastructure", None, "refuses the key"),
        ((500, {"detail": "boom"}), "infrastructure", None, "boom"),
        ((200, {"choices": []}), "infrastructure", None, "choices[0]"),
        ((200, ["x"]), "infrastructure", None, "not a JSON object"),
        (Disconnected("gone"), "infrastructure", None, "gone"),
    ],
)
async def test_a_failing_model_becomes_the_outcome(play, answer, outcome, reward, words):
    result, model, _ = await play("0", answer)
    assert (result.outcome, result.reward, result.turns) == (outcome, reward, 1)
    assert words in result.error
    assert len(model.requests) == 2, "a call that may have sampled is not repeated"


async def test_a_busy_model_is_asked_again(play, clock):
    result, model, _ = await play((503, {}), (429, {}), "3")
    assert result.outcome == "completed"
    assert len(model.requests) == 3


class Breaks(Environment):
    blocking = False

    def start(self, task):
        return Start("go")

    def step(self, message):
        raise ValueError("broken")


async def test_a_failing_environment_becomes_the_outcome(play):
    result, _, _ = await play("x", environment=Breaks)
    assert (result.outcome, result.reward, result.turns) == ("environment_failed", None, 0)
    assert "Breaks.step" in result.error


async def test_a_start_that_fails_becomes_the_outcome(play):
    class NoStart(Breaks):
        def start(self, task):
            raise TideError("invalid", "task.level: missing")

    result, _, _ = await play("x", environment=NoStart)
    assert (result.task_id, result.outcome) == (None, "infrastructure")
    assert "task.level" in result.error


async def test_an_agent_that_raises_becomes_the_outcome(play):
    @agent
    async def bad(ctx):
        await ctx.step(await ctx.generate())
        raise KeyError("oops")

    result, _, http = await play("0", player=bad)
    assert (result.outcome, result.reward, result.turns, result.error) == ("agent_error", None, 1, "KeyError: 'oops'")
    assert "agent_error" in codec.loads(http.calls[-2][2])["reason"]


async def test_what_an_agent_returns_counts(play):
    @agent
    async def scorer(ctx):
        await ctx.step(await ctx.generate(max_tokens=3))
        assert ctx.turn == 1
        assert ctx.reward == 0.0
        assert not ctx.done
        assert await ctx.report(prompt_tokens=1, completion_tokens=1) is False
        return AgentResult(0.25, {"a": 1})

    result, model, _ = await play("0", player=scorer)
    assert (result.outcome, result.reward, dict(result.metrics)) == ("completed", 0.25, {"a": 1})
    assert model.requests[0][1]["max_tokens"] == 3

    @agent
    async def stops(ctx):
        await ctx.step("0")

    result, _, _ = await play("0", player=stops)
    assert (result.outcome, result.reward) == ("truncated", 0.0)

    @agent
    async def odd(ctx):
        return "a string"

    result, _, _ = await play("0", player=odd)
    assert result.outcome == "agent_error"

    @agent
    async def infinite(ctx):
        return float("inf")

    result, _, _ = await play("0", player=infinite)
    assert (result.outcome, result.reward) == ("agent_error", None)


async def test_the_environments_final_score_and_metrics_count(play, guess_class):
    class Scored(guess_class):
        def end(self, reason):
            return EndInfo(reward=0.75, metrics={"n": len(self.taken)})

    result, _, _ = await play("3", environment=Scored)
    assert (result.reward, dict(result.metrics)) == (0.75, {"n": 1})


async def test_a_step_after_the_end_or_beside_another_is_the_agents_error(play, gated_class):
    @agent
    async def greedy(ctx):
        await asyncio.gather(ctx.step("0"), ctx.step("1"))

    assert "another step" in (await play("x", player=greedy, environment=gated_class))[0].error

    @agent
    async def late(ctx):
        await ctx.step("3")
        await ctx.step("3")

    assert "while not ctx.done" in (await play("x", player=late))[0].error


async def test_the_deadline_ends_the_task(play):
    @agent
    async def sleeps(ctx):
        await asyncio.Event().wait()

    result, _, _ = await play("x", player=sleeps, spec=TaskSpec("guess", "k", deadline_s=0.01))
    assert (result.outcome, result.reward) == ("truncated", 0.0)
    assert "longer than 0.01 s" in result.error


async def test_a_cancelled_run_ends_its_task_and_goes_on_being_cancelled(asgi, guess_class):
    http = asgi(EnvironmentServer(guess_class))
    playing = asyncio.Event()

    @agent
    async def sleeps(ctx):
        playing.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(
        run_task(sleeps, SPEC, GatewayClient("http://g", http=http), ModelEndpoint("http://m", http=FakeModel("x")))
    )
    await playing.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert http.calls[-1][1] == "/end"
    assert (await http.call("GET", "/health"))[1]["tasks"] == 0


async def test_a_run_cancelled_while_it_starts_ends_what_it_started(asgi, gated_class):
    release = asyncio.Event()

    async def start(self, task):
        gated_class.log.append("start")
        await release.wait()
        return Start("go")

    gated_class.start = start
    http = asgi(EnvironmentServer(gated_class))
    running = asyncio.create_task(
        run_task(chat_agent, SPEC, GatewayClient("http://g", http=http), ModelEndpoint("http://m", http=FakeModel("x")))
    )
    while not gated_class.log:  # noqa: ASYNC110 (the start sets no event)
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gated_class.log[-1].startswith("end")


async def test_the_start_is_told_and_may_name_the_tasks_own_endpoint(play):
    told = []

    async def on_started(started):
        told.append(started.task_id)
        return ModelEndpoint("http://m/v1", http=own).at(base_url="http://m/tasks/7/v1", api_key="own")

    own = FakeModel("3")
    result, model, _ = await play("x", on_started=on_started)
    assert (result.outcome, told) == ("completed", [result.task_id])
    assert (own.requests[0][0], own.requests[0][2]) == ("/tasks/7/v1/chat/completions", {"Authorization": "Bearer own"})
    assert model.requests == []
    with pytest.raises(ValueError, match="not on http://m"):
        ModelEndpoint("http://m/v1").at(base_url="http://other/v1")


async def test_many_tasks_run_at_a_bounded_concurrency_and_keep_their_order(asgi, guess_class):
    http = asgi(EnvironmentServer(type("Wide", (guess_class,), {"capacity": 2})))
    gateway = GatewayClient("http://g", http=http)
    specs = [TaskSpec("guess", f"k{number}", seed=number) for number in range(6)]
    results = await run_tasks(chat_agent, specs, gateway, ModelEndpoint("http://m", http=FakeModel("3")), concurrency=2)
    assert [result.turns for result in results] == [1 if result.reward else 3 for result in results]
    assert len({result.task_id for result in results}) == 6
    with pytest.raises(ValueError, match="concurrency"):
        await run_tasks(chat_agent, specs, gateway, ModelEndpoint("http://m"), concurrency=0)
