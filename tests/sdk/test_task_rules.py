"""The rules of turns and pauses, alone and through a whole server."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_sdk.clocks import ClockName, TaskState
from tide_sdk.environment import Environment, Start, Step
from tide_sdk.errors import TideError
from tide_sdk.server import EnvironmentServer
from tide_sdk.task_rules import TurnDecision, TurnView, decide_pause, decide_turn

states = st.sampled_from(TaskState)
views = st.builds(
    TurnView,
    state=states,
    next_turn=st.integers(0, 3),
    last_turn=st.none() | st.integers(0, 3),
    superseded=st.booleans(),
    expired=st.none() | st.sampled_from(ClockName),
)


@given(views, st.integers(0, 4))
def test_an_action_runs_only_while_the_agent_may_act_and_only_as_the_next_turn(view, turn):
    try:
        decision = decide_turn(view, turn)
    except TideError:
        assert turn != view.last_turn
        return
    if decision is TurnDecision.ACT:
        assert view.state is TaskState.WAITING
        assert turn == view.next_turn != view.last_turn
        assert not view.superseded
        assert view.expired is None
    else:
        assert turn == view.last_turn


@given(
    st.lists(st.tuples(st.booleans(), st.none() | st.integers(1, 6))),
    st.sampled_from([TaskState.WAITING, TaskState.ACTING]),
)
def test_epochs_only_grow_and_an_old_one_changes_nothing(asked, state):
    epoch = 0
    for pause, number in asked:
        after = decide_pause(state, epoch, number, pause=pause)
        if number is not None and number <= epoch:
            assert (after.state, after.epoch) == (state, epoch)
        else:
            assert after.epoch == (epoch if number is None else number)
            assert (after.state in (TaskState.PAUSED, TaskState.PAUSING)) == pause
        state, epoch = after.state, after.epoch


@given(states, st.booleans())
def test_a_pause_never_brings_a_task_back(state, pause):
    after = decide_pause(state, 0, None, pause=pause).state
    if state in (TaskState.STARTING, TaskState.DONE, TaskState.ENDING, TaskState.ENDED):
        assert after is state


class Recorder(Environment):
    """Writes down each action that it takes; ends after four."""

    blocking = False

    def start(self, task):
        self.taken: list[str] = []
        RECORDERS.append(self)
        return Start("go")

    def step(self, message):
        self.taken.append(message.text)
        return Step(f"took {message.text}", reward=1.0, terminated=len(self.taken) == 4)


class SlowRecorder(Recorder):
    """The same, giving up the loop in between."""

    async def step(self, message):
        await asyncio.sleep(0)
        return Recorder.step(self, message)


RECORDERS: list[Recorder] = []
calls = st.one_of(
    st.tuples(st.just("act"), st.integers(0, 5), st.sampled_from("ab")),
    st.tuples(st.sampled_from(["pause", "resume"]), st.none() | st.integers(1, 5), st.none()),
    st.tuples(st.just("end"), st.none(), st.none()),
)


@pytest.mark.parametrize("kind", [Recorder, SlowRecorder])
@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(calls, min_size=1, max_size=4), max_size=12))
def test_whatever_is_called_each_turn_runs_once_and_keeps_its_answer(asgi, kind, batches):
    async def play():
        client = asgi(EnvironmentServer(kind))
        RECORDERS.clear()
        task_id = (await client.call("POST", "/start", {"environment": "e", "key": "k"}))[1]["task_id"]
        answers: dict[int, tuple[str, dict]] = {}

        async def one(name, number, text):
            if name == "act":
                message = {"role": "assistant", "content": text}
                status, body = await client.call(
                    "POST", "/observation", {"task_id": task_id, "turn": number, "message": message}
                )
                if status == 200:
                    assert answers.setdefault(number, (text, body)) == (text, body)
                else:
                    assert status in (409, 410, 423)
            else:
                body = {"task_id": task_id} | ({"epoch": number} if number else {})
                status, _ = await client.call("POST", f"/{name}", body)
                assert status in (200, 410)

        for batch in batches:
            await asyncio.gather(*(one(*call) for call in batch))
        taken = RECORDERS[0].taken
        for turn, (text, body) in answers.items():
            assert taken[turn] == text
            assert body["turn"] == turn + 1
        assert sorted(answers) == list(range(len(answers)))
        account = (await client.call("POST", "/end", {"task_id": task_id}))[1]
        assert account["turns"] == len(answers)
        assert account["reward"] == len(answers)

    asyncio.run(play())
