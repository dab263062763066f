"""Recordings that somebody else made: deep values, words for the terminal, damaged neighbours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_examples import browser_task

from tide_trainer import cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "trajectories").mkdir()
    return tmp_path


def keep(folder: Path, name: str, **changes) -> None:
    (folder / "trajectories" / f"{name}.json").write_text(json.dumps(browser_task() | changes))


def test_arguments_nested_as_deep_as_json_reads_them_are_shown_somehow(folder: Path, capsys) -> None:
    calls = []
    for depth in range(910, 990, 3):  # somewhere there it can just be read
        deep = '{"a": ' + "[" * depth + "]" * depth + "}"
        calls.append({"id": str(depth), "type": "function", "function": {"name": "act", "arguments": deep}})
    keep(folder, "deep", uid="deep", messages=[{"role": "assistant", "tool_calls": calls}])
    assert cli.main(["trajectory", str(folder), "deep"]) == 0, capsys.readouterr().err


def test_no_word_of_a_recording_is_obeyed_by_the_terminal(folder: Path, capsys) -> None:
    keep(folder, "one", uid="a\x1b]0;owned\x07\u202e", outcome="\x1b[2J\nline")
    (folder / "trajectories" / "bad\x1b[2J.json").write_text("{")
    assert cli.main(["trajectory", str(folder), "--list"]) == 0
    assert cli.main(["trajectory", str(folder), "bad\x1b[2J"]) == 2
    told = capsys.readouterr()
    assert all(char.isprintable() or char == "\n" for char in told.out + told.err)
    assert len(told.out.splitlines()) == 3


def test_a_damaged_neighbour_does_not_hide_that_a_name_is_not_there(folder: Path, capsys) -> None:
    (folder / "trajectories" / "train.17.3.json").write_text("{")
    assert cli.main(["trajectory", str(folder), "train/17/4"]) == 2
    assert "'train/17/4' is not among the 1 recorded trajectories; near it: train.17.3" in capsys.readouterr().err
