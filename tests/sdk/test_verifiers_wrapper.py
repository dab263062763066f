"""Single-file environments in the style of `verifiers`, served through a real environment server."""

from __future__ import annotations

import signal
import sys

import pytest
import single_file_environments as files

from tide_sdk.server import EnvironmentServer
from tide_sdk.wrappers.verifiers import wrap_verifiers


class Played:
    """One task over the wire."""

    def __init__(self, client):
        self.client, self.turn = client, 0

    async def start(self, task=None, **more):
        body = {"environment": "e", "key": "k", "seed": 2, "task": task or {}} | more
        self.status, self.started = await self.client.call("POST", "/start", body)
        return self

    async def say(self, content, *calls):
        message = {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})
        body = {"task_id": self.started["task_id"], "turn": self.turn, "message": message}
        self.turn += 1
        self.status, answer = await self.client.call("POST", "/observation", body)
        return answer

    async def end(self):
        return (await self.client.call("POST", "/end", {"task_id": self.started["task_id"]}))[1]


@pytest.fixture
def play(asgi):
    """`await play(load, task)`: a started task."""

    async def start(load, task=None, arguments=None, **more):
        wrapped = wrap_verifiers(load, **(arguments or {}))
        return await Played(asgi(EnvironmentServer(wrapped))).start(task, **more)

    return start


async def test_a_single_turn_is_scored_by_all_rubrics_with_the_arguments_they_name(play):
    task = await play(files.load_environment)
    assert [message["content"] for message in task.started["messages"]] == ["Be exact.", "2+1?"]
    answer = await task.say(" 3 ")
    assert (answer["messages"], answer["reward"], answer["terminated"]) == ([], 1.5, True)
    account = await task.end()
    assert (account["reward"], account["metrics"]) == (1.5, {"correct": 1.0, "short": 1.0})


async def test_arguments_of_the_file_come_with_the_wrapping(play):
    task = await play(files.load_environment, arguments={"bound": 1})
    assert (await task.say("four"))["reward"] == 0.0


@pytest.mark.parametrize(
    ("task", "more", "question"),
    [
        ({"index": 4}, {}, "4+1?"),
        ({}, {"seed": 8}, "3+1?"),
        ({}, {"kind": "eval"}, "6*7?"),
        ({}, {"split": "test", "seed": None}, "6*7?"),
        ({"question": "my own?", "answer": "x"}, {}, "my own?"),
    ],
)
async def test_the_task_or_the_seed_chooses_the_row(play, task, more, question):
    played = await play(files.load_environment, task, **more)
    assert [message["content"] for message in played.started["messages"]] == ["Be exact.", question]


@pytest.mark.parametrize(
    ("task", "field"), [({"index": 5}, "task.index"), ({"index": True}, "task.index"), ({"row": 1}, "task.row")]
)
async def test_bad_task_parameters_are_named(play, task, field):
    played = await play(files.load_environment, task)
    assert (played.status, played.started["field"]) == (422, field)


@pytest.mark.parametrize("load", [files.OldGuess, files.NewGuess])
async def test_several_turns_end_by_the_files_own_conditions(play, load):
    task = await play(load)
    answer = await task.say("9")
    assert (answer["messages"][0]["content"], answer["reward"], answer["terminated"]) == ("no", None, False)
    answer = await task.say("3")
    assert (answer["messages"][0]["content"], answer["terminated"]) == ("right", True)
    assert answer["reward"] == (0.5 if load is files.OldGuess else 2.0)


async def test_at_its_bound_of_turns_a_task_is_truncated_and_scored(play):
    task = await play(files.OldGuess)
    answers = [await task.say(word) for word in ("7", "8", "9")]
    assert [answer["truncated"] for answer in answers] == [False, False, True]
    assert answers[-1]["reward"] == 0.0


async def test_what_the_agent_leaves_early_is_scored_and_cleaned_up(play):
    made = files.NewGuess()
    task = await play(lambda: made, {"question": "?", "answer": "x", "info": {"hints": ["warm"]}})
    assert (await task.say("9"))["messages"][0]["content"] == "warm"
    account = await task.end()
    assert (account["reward"], account["metrics"], account["outcome"]["kind"]) == (1.0, {"tries": 1.0}, "aborted")
    assert made.cleaned == [1.0]


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 1}'}}


@pytest.mark.parametrize(
    "load",
    [
        files.Answering,
        lambda: files.Object(dataset=files.ROWS, tools=[files.add], rubric=files.Answering.rubric, max_turns=4),
    ],
)
async def test_tools_are_offered_and_their_calls_answered(play, load):
    task = await play(load)
    assert task.started["tools"][0]["function"]["name"] == "add"
    answer = await task.say(None, CALL)
    assert answer["messages"] == [{"role": "tool", "content": "3", "tool_call_id": "c"}]
    answer = await task.say("it is 3")
    assert (answer["reward"], answer["terminated"]) == (1.0, True)


async def test_a_reward_function_that_raises_fails_the_task_and_is_no_reward_of_0(play):
    def broken(completion):
        raise ZeroDivisionError("no judge")

    task = await play(files.load_environment, arguments={"rubric": files.Rubric([broken])})
    answer = await task.say("3")
    assert (task.status, answer["code"]) == (502, "environment_failed")
    assert "reward function broken: ZeroDivisionError: no judge" in answer["detail"]
    assert (await task.end())["reward"] is None


def test_a_module_is_found_by_its_name_and_signals_stay_the_servers(tmp_path, monkeypatch):
    (tmp_path / "my_file.py").write_text(
        "import signal\n"
        "class Env:\n"
        "    dataset = [{'question': 'q', 'answer': 'a'}]\n"
        "def load_environment():\n"
        "    signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "    return Env()\n"
    )
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    wrapped = wrap_verifiers("my-file")
    sys.modules.pop("my_file")
    assert signal.getsignal(signal.SIGTERM) is before
    assert (wrapped.name, wrapped.__name__) == ("my-file", "MyFile")


@pytest.mark.parametrize(
    ("load", "told"),
    [
        (lambda: files.load_environment(rubric=files.Rubric([lambda completions: [1.0]])), "scores groups"),
        (lambda: files.load_environment(rubric=files.Rubric([files.correct], [1.0, 2.0])), "1 functions and 2 weights"),
        (lambda: files.Object(rubric=None), "has no dataset"),
    ],
)
def test_what_cannot_be_served_is_refused_when_it_is_wrapped(load, told):
    with pytest.raises(ValueError, match=told):
        wrap_verifiers(load)


def test_a_module_without_the_function_is_refused():
    with pytest.raises(ValueError, match="no function load_environment"):
        wrap_verifiers("json")
