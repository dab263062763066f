"""`tide-env new` writes a project that works as it is, and writes over nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tide_gateway.settings import load_settings
from tide_sdk import cli


def test_the_project_passes_its_own_tests_the_check_of_its_server_among_them(tmp_path):
    assert cli.main(["new", "number_guess", "--path", str(tmp_path / "deep" / "folder")]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(command, cwd=tmp_path / "deep/folder", capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_project_is_as_tidy_as_this_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "maze"]) == 0
    assert capsys.readouterr().out.startswith("maze: begin with maze/environment.py")
    text = "".join(path.read_text() for path in (tmp_path / "maze").rglob("*") if path.is_file())
    assert not [mark for mark in ("@name@", "@Class@", "@project@", "@version@") if mark in text]
    lint = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--select",
        "E,F,I,UP,B",
        "--line-length",
        "120",
        "maze",
    ]
    done = subprocess.run(lint, cwd=tmp_path / "maze", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    project = tomllib.loads((tmp_path / "maze/pyproject.toml").read_text())
    assert (project["project"]["name"], project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == (
        "maze",
        ["maze"],
    )
    (spec,) = load_settings(tmp_path / "maze/environments.toml", {}).environments.values()
    assert (spec.runtime, spec.command[2]) == ("process", "maze.environment:Maze")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-Game", "for example my_game"),
        ("2048", "for example my_game"),
        ("../up", "for example up"),
        ("game__x", "for example game_x"),
        ("", "for example my_game"),
        ("caf\u00e9", "for example caf"),
        ("a" * 65, "for example aaa"),
        ("class", "another, for example class_game"),
        ("random", "another, for example random_game"),
        ("tide_sdk", "another, for example tide_sdk_game"),
        ("tests", "another, for example tests_game"),
        ("tiderl", "another, for example tiderl_game"),
        ("pytest", "another, for example pytest_game"),
        ("none", "another, for example none_game"),
        ("environment", "another, for example environment_game"),
    ],
)
def test_a_name_that_no_package_can_have_is_refused(tmp_path, monkeypatch, capsys, name, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", name]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_exists_is_written_over(tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    assert cli.main(["new", "maze", "--path", str(tmp_path)]) == 2
    assert "is not empty; nothing was written" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert cli.main(["new", "maze", "--path", str(tmp_path / "README.md")]) == 2
    assert "cannot be written" in capsys.readouterr().err
