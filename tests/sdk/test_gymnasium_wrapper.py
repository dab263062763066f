"""Real gymnasium environments, played by messages through a real environment server."""

from __future__ import annotations

import base64
import io
import json

import gymnasium
import numpy
import pytest
from gymnasium import spaces

from tide_sdk.environment import StartInfo
from tide_sdk.server import EnvironmentServer
from tide_sdk.wire import Message
from tide_sdk.wrappers.gymnasium import GymnasiumEnvironment, image_part, wrap
from tide_sdk.wrappers.gymnasium_actions import BadAction, expected, read_action
from tide_sdk.wrappers.plain import plain

FrozenLake = wrap("FrozenLake-v1", actions=["left", "down", "right", "up"], is_slippery=False, rules="Reach the goal.")


class Echo(gymnasium.Env):
    """Answers with the action that it was given; renders one colour."""

    observation_space = spaces.Text(1000)

    def __init__(self, space, render_mode=None):
        self.action_space = space
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"seed {seed} options {options}", {}

    def step(self, action):
        info = {"action": action, "nan": numpy.float32("nan"), 3: {1, 2}, "big": 2**70}
        return repr(action), numpy.float64(0.5), numpy.bool_(False), False, info

    def render(self):
        return numpy.full((2, 3, 3), 7, dtype="uint8")

    def close(self):
        Echo.closed = True


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


async def test_a_wrapped_environment_is_played_over_the_wire(asgi):
    client = asgi(EnvironmentServer(FrozenLake))
    body = {"environment": "frozenlake-v1", "key": "k", "seed": 2**40}
    started = (await client.call("POST", "/start", body))[1]
    text = started["messages"][0]["content"]
    assert text == "Reach the goal.\nAnswer with one of: left, down, right, up.\n\n0"
    rewards = []
    for turn, words in enumerate(["down", "Down", "right.", "I go: down", "I move right now", "right"]):
        message = {"role": "assistant", "content": words}
        answer = (
            await client.call("POST", "/observation", {"task_id": started["task_id"], "turn": turn, "message": message})
        )[1]
        rewards.append(answer["reward"])
    assert rewards == [0, 0, 0, 0, 0, 1]
    assert (answer["terminated"], answer["messages"][0]["content"]) == (True, "15")
    account = (await client.call("POST", "/end", {"task_id": started["task_id"]}))[1]
    assert (account["reward"], account["outcome"]["kind"]) == (1.0, "completed")


def test_the_same_seed_gives_the_same_episode():
    Slippery = wrap("FrozenLake-v1", actions=["left", "down", "right", "up"])

    def play(seed):
        environment = Slippery()
        environment.start(StartInfo({}, seed=seed))
        steps = [environment.step(say("down")) for _ in range(3)]
        return [step.messages for step in steps]

    assert play(5) == play(5)
    assert len({str(play(seed)) for seed in range(6)}) > 1


def test_a_bad_action_is_told_costs_nothing_and_ends_the_task_in_the_end():
    environment = FrozenLake()
    environment.start(StartInfo({}))
    step = environment.step(say("left or right?"))
    assert (step.reward, step.truncated, step.info) == (None, False, {"bad_action": True})
    assert "more than one action" in str(step.messages)
    assert environment.step(say("down")).messages == [{"role": "user", "content": "4"}]
    steps = [environment.step(say("?")) for _ in range(FrozenLake.max_bad_actions)]
    assert [step.truncated for step in steps] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(3), "2", 2),
        (spaces.Discrete(3, start=5), "I choose 6", 6),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.MultiDiscrete([2, 3]), "so [1, 2] it is", [1, 2]),
        (spaces.MultiBinary(2), "[0, 1]", [0, 1]),
        (spaces.Box(-1, 1, (2,)), "[0.5, -1]", [0.5, -1]),
        (spaces.Box(0, 9, (), dtype=numpy.int64), "7", 7),
        (spaces.Text(5), "abc", "abc"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), '[1, "a"]', (1, "a")),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,))), 'x {"a": 1, "b": [0.5]} y', {"a": 1, "b": [0.5]}),
    ],
)
def test_an_action_is_read_by_the_kind_of_its_space(space, text, action):
    read = read_action(space, text)
    assert space.contains(read)
    assert plain(read) == plain(action)
    assert expected(space)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Discrete(3), "3"),
        (spaces.Discrete(3), "1.5"),
        (spaces.Discrete(3), ""),
        (spaces.MultiDiscrete([2, 3]), "[1, 3]"),
        (spaces.MultiDiscrete([2, 3]), "[1.5, 0]"),
        (spaces.MultiDiscrete([2, 3]), "[[1], 0]"),
        (spaces.Box(-1, 1, (2,)), "[0.5]"),
        (spaces.Box(-1, 1, (2,)), '["a", "b"]'),
        (spaces.Box(-1, 1, (2,)), "[NaN, 0]"),
        (spaces.Box(0, 255, (1,), dtype=numpy.uint8), "[256]"),
        (spaces.Text(2), "abc"),
        (spaces.Dict(a=spaces.Discrete(2)), "{}"),
        (spaces.Dict(a=spaces.Discrete(2)), "[" * 5000),
        (spaces.Tuple([spaces.Discrete(2)]), "[0, 1]"),
    ],
)
def test_what_is_no_action_is_a_bad_action(space, text):
    with pytest.raises(BadAction):
        read_action(space, text)


async def test_rewards_flags_and_info_become_json_and_the_end_closes(asgi):
    Echo.closed = False
    client = asgi(EnvironmentServer(wrap(Echo, space=spaces.Box(0, 1, (2,)), max_turns=1)))
    body = {"environment": "e", "key": "k", "seed": 3, "task": {"options": {"level": 1}}}
    started = (await client.call("POST", "/start", body))[1]
    assert "seed 3 options {'level': 1}" in started["messages"][0]["content"]
    message = {"role": "assistant", "content": "[0, 1]"}
    status, answer = await client.call(
        "POST", "/observation", {"task_id": started["task_id"], "turn": 0, "message": message}
    )
    assert (status, answer["reward"], answer["terminated"], answer["truncated"]) == (200, 0.5, False, True)
    assert answer["info"] == {"action": [0.0, 1.0], "nan": "nan", "3": [1, 2], "big": str(2**70)}
    await client.call("POST", "/end", {"task_id": started["task_id"]})
    assert Echo.closed


def test_what_it_renders_is_shown_as_an_image():
    Image = pytest.importorskip("PIL.Image")
    environment = wrap(Echo, space=spaces.Discrete(2), image=True)()
    (message,) = environment.start(StartInfo({}, seed=1)).messages
    text, image = message["content"]
    assert text["text"].endswith("seed 1 options None")
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(data)) as shown:
        assert (shown.size, shown.getpixel((0, 0))) == ((3, 2), (7, 7, 7))


def test_observations_and_actions_may_be_read_by_code_of_ones_own():
    class Words(GymnasiumEnvironment):
        def describe(self, observation):
            return f"You are at {divmod(int(observation), 4)}."

        def read_action(self, text):
            return {"S": 1}.get(text) or super().read_action(text)

    environment = wrap("FrozenLake-v1", base=Words, is_slippery=False)()
    assert environment.start(StartInfo({})).messages[0]["content"].endswith("You are at (0, 0).")
    assert environment.step(say("S")).messages[0]["content"] == "You are at (1, 0)."


async def test_bad_task_parameters_and_wrong_names_are_told(asgi):
    client = asgi(EnvironmentServer(FrozenLake))
    for task, field in (({"x": 1}, "task.x"), ({"options": 1}, "task.options")):
        status, problem = await client.call("POST", "/start", {"environment": "e", "key": "k", "task": task})
        assert (status, problem["field"]) == (422, field)
    client = asgi(EnvironmentServer(wrap("FrozenLake-v1", actions=["a", "b"])))
    problem = (await client.call("POST", "/start", {"environment": "e", "key": "k"}))[1]
    assert "actions: 2 names for 4 actions" in problem["detail"]


def test_large_arrays_are_told_by_their_shape():
    assert plain({"a": numpy.zeros((100, 100))}) == {"a": "array of shape (100, 100), float64"}
    assert json.dumps(plain([numpy.int32(3), (numpy.bool_(True), b"x", None)])) == "[3, [true, \"b'x'\", null]]"


@pytest.mark.parametrize(
    "frame",
    [
        numpy.full((4, 4, 3), 0.5),
        numpy.full((4, 4, 3), 300),
        numpy.full((4, 4, 3), -1),
        numpy.full((4, 4, 3), numpy.nan),
        numpy.zeros((0, 4, 3)),
    ],
)
def test_a_frame_that_would_be_shown_as_another_picture_is_refused(frame):
    with pytest.raises(ValueError, match=r"render\(\) gave"):
        image_part(frame)


def test_a_frame_of_whole_numbers_of_another_type_is_shown_as_it_is():
    assert image_part(numpy.full((4, 4, 3), 200, dtype=numpy.int64)) == image_part(
        numpy.full((4, 4, 3), 200, dtype=numpy.uint8)
    )
