"""The environment class: messages, info, and parameters that are refused."""

from __future__ import annotations

import pytest

from tide_environments.babyai.environment import BabyAI
from tide_sdk.environment import StartInfo
from tide_sdk.errors import TideError
from tide_sdk.wire import Message


def say(word: str) -> Message:
    return Message(role="assistant", content=word)


def test_the_expert_field_leads_to_success():
    environment = BabyAI()
    start = environment.start(StartInfo({"expert": True}, seed=3))
    message = start.messages[0]
    assert message["role"] == "user"
    assert message["content"].startswith("go to ")
    while True:
        step = environment.step(say(message["expert_action"]))
        if step.terminated or step.truncated:
            break
        message = step.messages[0]
        assert message["expert_action"] == step.info["expert_action"]
    assert step.info["success"]
    assert step.reward > 0.5
    assert "expert_action" not in step.info
    assert "expert_action" not in step.messages[0]


def test_without_expert_no_action_leaks():
    environment = BabyAI()
    assert set(environment.start(StartInfo({}, seed=3)).messages[0]) == {"role", "content"}
    step = environment.step(say("left"))
    assert set(step.info) == {"success", "valid"}
    assert set(step.messages[0]) == {"role", "content"}


def test_text_parts_are_read_and_an_empty_message_is_an_unknown_word():
    environment = BabyAI()
    environment.start(StartInfo({}, seed=3))
    parts = Message(role="assistant", content=[{"type": "text", "text": "left"}])
    assert environment.step(parts).info["valid"]
    assert not environment.step(Message(role="assistant", content=None)).info["valid"]


@pytest.mark.parametrize(
    ("task", "field"),
    [
        ({"level": "BabyAI-Nowhere-v0"}, "task.level"),
        ({"max_turns": 0}, "task.max_turns"),
        ({"max_turns": "many"}, "task.max_turns"),
        ({"lvl": "x"}, "task.lvl"),
    ],
)
def test_bad_parameters_name_the_field(task, field):
    with pytest.raises(TideError) as caught:
        BabyAI().start(StartInfo(task, seed=1))
    assert caught.value.code == "invalid"
    assert caught.value.extra["field"] == field


def test_it_keeps_the_promise_of_quick_plain_methods():
    assert BabyAI.blocking is False
    assert BabyAI.capacity >= 256
