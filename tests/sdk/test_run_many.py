"""`tide_sdk.run`: repeats, attempts where the infrastructure failed, what is told before anything is played."""

from __future__ import annotations

import asyncio
import io

import pytest
from openai_server import number_of_answers, serving

from tide_sdk import EnvironmentServer, ModelEndpoint, TransportError, chat_agent, run
from tide_sdk.many import NotReady, Progress
from tide_sdk.pool import each


@pytest.fixture
def play(uvicorn_server, guess_class):
    """Run many tasks against a real environment server, off the event loop."""

    async def play(model_url, **options):
        async with uvicorn_server(EnvironmentServer(guess_class, capacity=64)) as gateway:
            given = {"environment": "guess", "gateway": gateway, "model": ModelEndpoint(model_url)} | options
            return await asyncio.to_thread(run, chat_agent, **given)

    return play


async def test_each_task_is_played_as_often_as_it_is_asked_for_in_order(play):
    with serving(number_of_answers) as model:
        results = await play(model.url, seeds=[2, 5, 9], repeats=3)
    rewards = [result.reward for result in results]
    assert len(rewards) == 9
    assert [rewards[i : i + 3] for i in (0, 3, 6)] == [[rewards[i]] * 3 for i in (0, 3, 6)]
    assert len({result.task_id for result in results}) == 9


async def test_what_the_infrastructure_broke_is_tried_again_and_told_if_it_stays_broken(play):
    calls = []

    def sometimes(messages):
        calls.append(messages)
        return 500 if len(calls) in (1, 2) else number_of_answers(messages)

    with serving(sometimes) as model:
        (result,) = await play(model.url, seeds=[2], attempts=3)
        assert result.outcome in ("completed", "truncated")
        model.say = lambda messages: 500
        (result,) = await play(model.url, seeds=[2], attempts=2)
    assert (result.outcome, result.reward) == ("infrastructure", None)
    assert "HTTP 500" in result.error


async def test_a_wrong_request_is_not_made_again(play):
    with serving(lambda messages: 400) as model:
        (result,) = await play(model.url, attempts=3)
        assert result.outcome == "agent_error"
        assert len(model.bodies) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gateway": "http://127.0.0.1:9"}, "no gateway answers at http://127.0.0.1:9"),
        ({"model": "http://127.0.0.1:9/v1"}, "no model's server answers at http://127.0.0.1:9/v1"),
    ],
)
async def test_what_cannot_be_reached_is_told_before_anything_is_played(play, options, told):
    if "model" in options:
        options = {"model": ModelEndpoint(options["model"])}
    with serving(number_of_answers) as model:
        with pytest.raises(NotReady, match=told):
            await play(model.url, **options)
        assert model.bodies == []
    assert issubclass(NotReady, TransportError)


async def test_a_model_that_refuses_the_key_is_told(play):
    with serving(number_of_answers, key="right") as model, pytest.raises(NotReady, match="give another key"):
        await play(model.url, model=ModelEndpoint(model.url, api_key="wrong"))


async def test_a_gateway_without_the_environment_says_what_it_has(uvicorn_server):
    async def gateway(scope, receive, send):
        body = b'[{"name": "babyai"}, {"name": "codebreaker"}]'
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async with uvicorn_server(gateway, lifespan="off") as url:
        with pytest.raises(NotReady, match=r"no environment 'guess' at .*, which has babyai, codebreaker"):
            await asyncio.to_thread(
                run, chat_agent, environment="guess", gateway=url, model=ModelEndpoint("http://127.0.0.1:9/v1")
            )


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"repeats": 0}, {"attempts": 0}])
def test_numbers_below_one_are_refused(wrong):
    model = ModelEndpoint("http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match="at least 1"):
        run(chat_agent, environment="guess", gateway="http://127.0.0.1:9", model=model, **wrong)


def test_the_line_of_progress_is_for_terminals_alone():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        times = iter(range(100))
        with Progress(4, stream, num_done=1, now=lambda times=times: float(next(times))) as progress:
            progress.add("completed", 1.0)
            progress.add("infrastructure", None)
        assert bool(stream.getvalue()) is shown
        if shown:
            assert "3/4 played, mean reward 1.000, 1 without a reward" in stream.getvalue()
            assert stream.getvalue().endswith("\n")


async def test_a_pool_takes_items_only_as_there_is_room_and_raises_the_failure_itself():
    taken, most = [], []
    running = 0

    async def work(item):
        nonlocal running
        running += 1
        most.append(running)
        await asyncio.sleep(0)
        running -= 1
        if item == 7:
            raise KeyError("seven")

    def items():
        for item in range(1000):
            taken.append(item)
            yield item

    with pytest.raises(KeyError, match="seven"):
        await each(items(), work, concurrency=3)
    assert max(most) == 3
    assert len(taken) < 20
