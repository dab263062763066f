"""Tasks, the folder of an evaluation, and its results line by line: nothing lost, nothing doubled, nothing mixed up."""

from __future__ import annotations

import json

import pytest

from tide_sdk import TaskResult
from tide_sdk.evaluation.folder import EvaluationFailed, EvaluationFolder, FolderRefused, read_lines
from tide_sdk.evaluation.records import MAX_CONVERSATION_BYTES, Play, Record, read_record, record_of
from tide_sdk.evaluation.tasks import EvaluationTask, TasksWrong, digest, parse_seeds, read_tasks, seeded_tasks

WHAT = {"model": "m", "sampling": {"temperature": 1.0}, "tasks": {"num": 4}, "repeats": 2, "threshold": 0.0}
PLAYS = [Play(task, repeat) for repeat in range(2) for task in seeded_tasks(range(4))]


def record(play, outcome="completed", reward: float | None = 1.0, **more):
    result = TaskResult("t", outcome, reward, 3, more.pop("metrics", {}), more.pop("error", None))
    return record_of(play, result, attempts=1, wall_s=0.5, **more)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0:3", [0, 1, 2]), ("7", [7]), ("0:2, 9,20:22", [0, 1, 9, 20, 21])],
)
def test_seeds_are_numbers_and_half_open_ranges(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3:3", "5:2", "-1", "0:3,2", "0:2000000", "1:2:3", "0.5"])
def test_other_seeds_are_refused(text):
    with pytest.raises(TasksWrong):
        parse_seeds(text)


def test_a_tasks_file_names_parameters_seeds_splits_and_groups(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task": {"level": 1}, "seed": 3, "split": "test", "group": "easy", "id": "a"}\n\n{"seed": 4}\n')
    assert read_tasks(path) == [EvaluationTask("a", {"level": 1}, 3, "test", "easy"), EvaluationTask("3", {}, 4)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"seed": 1}\n{"sed": 2}', ":2: sed: Extra inputs are not permitted"),
        ('{"seed": "1"}', ":1: seed: Input should be a valid integer"),
        ('{"seed": -1}', ":1: seed: "),
        ('{"id": "a"}\n{"id": "a"}', ":2: there is a task with the id 'a' already"),
        ("[1]", ":1: the line: "),
        ("{", ":1: is not one JSON object"),
        ("\n", "holds no task"),
    ],
)
def test_a_wrong_tasks_file_is_refused_with_its_line_and_field(tmp_path, text, told):
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(TasksWrong) as raised:
        read_tasks(path)
    assert told in str(raised.value)
    with pytest.raises(TasksWrong, match="cannot be read"):
        read_tasks(tmp_path / "none")


def test_the_digest_is_of_content_not_of_order_in_objects():
    assert digest([EvaluationTask("1", {"a": 1, "b": 2})]) == digest([EvaluationTask("1", {"b": 2, "a": 1})])
    assert digest([EvaluationTask("1", {"a": 1})]) != digest([EvaluationTask("1", {"a": 2})])
    assert digest([EvaluationTask("1"), EvaluationTask("2")]) != digest([EvaluationTask("2"), EvaluationTask("1")])


def test_a_record_comes_back_from_its_line():
    whole = record(PLAYS[1], messages=[{"role": "user", "content": "hello\n\u2028"}], metrics={"level": 2})
    assert whole.line().count(b"\n") == 1
    assert read_record(whole.line()) == whole
    lost = record(PLAYS[1], "infrastructure", None, error="gone \ud800")
    assert read_record(lost.line()).error == "gone ?"


@pytest.mark.parametrize("messages", [[{"content": float("nan")}], [{"content": "x" * MAX_CONVERSATION_BYTES}]])
def test_a_conversation_that_is_no_json_or_too_long_is_left_out_and_the_line_says_so(messages):
    read = read_record(record(PLAYS[0], messages=messages).line())
    assert (read.reward, read.turns, read.messages) == (1.0, 3, ())
    assert read.left_out


@pytest.mark.parametrize(
    "line", [b"[]", b"{}", b'{"id":"1","repeat":0,"outcome":"odd","reward":1,"turns":1}', b'{"id":"1","repeat":0']
)
def test_what_is_no_record_is_refused(line):
    with pytest.raises(ValueError):
        read_record(line)


def test_a_torn_line_and_failures_of_the_infrastructure_are_played_again_and_nothing_else(tmp_path):
    with EvaluationFolder(tmp_path / "out", WHAT, resume=False) as folder:
        key = folder.key
        folder.add(record(PLAYS[0]))
        folder.add(record(PLAYS[1], "infrastructure", None))
        folder.add(record(PLAYS[2], "environment_failed", None))
        folder.add(record(PLAYS[3], "agent_error", None))
        folder.add(record(PLAYS[4], reward=0.0))
        with pytest.raises(ValueError, match="already"):
            folder.add(record(PLAYS[0]))
    results = tmp_path / "out" / "results.jsonl"
    with results.open("ab") as file:
        file.write(record(PLAYS[5]).line()[:-4])
    with EvaluationFolder(tmp_path / "out", WHAT, resume=True) as folder:
        assert folder.missing(PLAYS) == [PLAYS[1], PLAYS[2], *PLAYS[5:]]
        assert (folder.key, folder.session) == (key, 2)
        for play in folder.missing(PLAYS):
            folder.add(record(play))
    found = [one.key for one, _ in read_lines(results)]
    assert sorted(found) == sorted(play.key for play in PLAYS)


def test_a_broken_line_in_the_middle_is_named_and_nothing_is_lost(tmp_path):
    with EvaluationFolder(tmp_path, WHAT, resume=True) as folder:
        folder.add(record(PLAYS[0]))
    results = tmp_path / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(b"{broken}\n" + whole)
    with pytest.raises(EvaluationFailed, match=r"results.jsonl:1: is no result"):
        EvaluationFolder(tmp_path, WHAT, resume=True).__enter__()
    assert results.read_bytes() == b"{broken}\n" + whole


def test_other_settings_are_refused_with_their_names(tmp_path):
    with EvaluationFolder(tmp_path, WHAT, resume=False):
        pass
    other = json.loads(json.dumps(WHAT)) | {"model": "n"}
    other["sampling"]["temperature"] = 0.5
    with pytest.raises(FolderRefused) as raised:
        EvaluationFolder(tmp_path, other, resume=True).__enter__()
    assert 'model: "m" then, "n" now; sampling.temperature: 1.0 then, 0.5 now' in str(raised.value)
    with EvaluationFolder(tmp_path, WHAT, resume=True) as folder:
        assert folder.session == 2, "a refused session does not count"


def test_a_folder_that_is_taken_is_refused(tmp_path):
    played, refused = EvaluationFolder(tmp_path / "a", WHAT, resume=False), pytest.raises(FolderRefused, match="plays")
    with played, refused:
        EvaluationFolder(tmp_path / "a", WHAT, resume=True).__enter__()
    with pytest.raises(FolderRefused, match="resume it"):
        EvaluationFolder(tmp_path / "a", WHAT, resume=False).__enter__()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("dear")
    with pytest.raises(FolderRefused, match=r"is not empty \(letter.txt\)"):
        EvaluationFolder(tmp_path / "b", WHAT, resume=True).__enter__()
    with pytest.raises(EvaluationFailed, match=r"letter\.txt"):
        EvaluationFolder(tmp_path / "b" / "letter.txt", WHAT, resume=True).__enter__()


def test_a_manifest_of_another_release_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(EvaluationFailed, match="another release"):
        EvaluationFolder(tmp_path, WHAT, resume=True).__enter__()


def test_records_with_a_reward_or_of_the_agents_own_making_are_final():
    final = {
        outcome: Record("1", 0, outcome, None, 0).final for outcome in ("agent_error", "aborted", "infrastructure")
    }
    assert final == {"agent_error": True, "aborted": False, "infrastructure": False}


def test_a_new_evaluation_in_which_nothing_was_played_gives_its_folder_free(tmp_path):
    with EvaluationFolder(tmp_path, WHAT, resume=False) as folder:
        assert folder.forget_if_unused()
    with EvaluationFolder(tmp_path, WHAT, resume=False) as folder:
        folder.add(record(PLAYS[0]))
        assert not folder.forget_if_unused()
    with EvaluationFolder(tmp_path, WHAT, resume=True) as folder:
        assert not folder.forget_if_unused()
        assert folder.missing(PLAYS) == PLAYS[1:]


def test_plays_that_do_not_count_keep_the_folder(tmp_path):
    with EvaluationFolder(tmp_path, WHAT, resume=False) as folder:
        folder.add(record(PLAYS[0], "infrastructure", None))
    with EvaluationFolder(tmp_path, WHAT, resume=True) as folder:
        assert folder.session == 2
        assert not folder.forget_if_unused()
