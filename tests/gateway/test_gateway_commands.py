"""Wrong files and commands: refused with one line before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tide_gateway.cli import main
from tide_gateway.specs import EnvironmentSpec


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "environments.toml"
    path.write_text('[environments.scripted]\nruntime = "fake"\n')
    return path


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_a_file_that_is_no_database_is_named(tmp_path, config, capsys, command):
    file = tmp_path / "notes.txt"
    file.write_text("these are notes, and long enough to be read as a page of a database " * 20)
    options = ["--config", str(config), "--port", "0"] if command == "serve" else []
    assert main([command, "--database", f"sqlite:///{file}", *options]) == 2
    assert capsys.readouterr().err.strip().splitlines() == [
        "tide-gateway: database: file is not a database; check --database"
    ]


def test_an_announce_file_that_cannot_be_written_is_refused_before_the_start(tmp_path, config, capsys):
    database = tmp_path / "gateway.db"
    options = ["--config", str(config), "--port", "0", "--database", f"sqlite:///{database}"]
    assert main(["serve", *options, "--announce", "/no/such/folder/a.json"]) == 2
    assert "--announce /no/such/folder/a.json: cannot be written" in capsys.readouterr().err
    assert main(["serve", *options, "--announce", str(tmp_path)]) == 2
    assert f"--announce {tmp_path}: is a folder" in capsys.readouterr().err
    assert not database.exists()


@pytest.mark.parametrize("command", [["serve"], ["migrate"], ["keys", "list"]])
@pytest.mark.parametrize("path", ["folder", "no/such/folder/gateway.db"])
def test_a_database_that_cannot_be_a_file_is_named(tmp_path, config, capsys, command, path):
    (tmp_path / "folder").mkdir()
    options = ["--config", str(config), "--port", "0"] if command == ["serve"] else []
    assert main([*command, "--database", f"sqlite:///{tmp_path / path}", *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert str(tmp_path / path.partition("/")[0]) in line


@pytest.mark.parametrize("seconds", ["-5", "nan", "1e-9"])
def test_servers_cannot_outlive_the_gateway_by_no_number_of_seconds(tmp_path, config, capsys, seconds):
    options = ["--config", str(config), "--port", "0", "--database", f"sqlite:///{tmp_path / 'gateway.db'}"]
    assert main(["serve", *options, "--outlive-s", seconds]) == 2
    assert f"--outlive-s {float(seconds):g}: must be 0, or 0.1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--drain-s", "-1", "must be 0 to 3600 seconds"),
        ("--drain-s", "nan", "must be 0 to 3600 seconds"),
        ("--retention-days", "-1", "must be 0.01 to"),
        ("--retention-days", "0.001", "must be 0.01 to"),
        ("--retention-days", "nan", "must be 0.01 to"),
    ],
)
def test_a_drain_or_a_retention_that_makes_no_sense_is_refused(tmp_path, config, capsys, option, value, words):
    options = ["--config", str(config), "--port", "0", "--database", f"sqlite:///{tmp_path / 'gateway.db'}"]
    assert main(["serve", *options, option, value]) == 2
    err = capsys.readouterr().err
    assert f"{option} {float(value):g}: {words}" in err


@pytest.mark.parametrize("host", ["a" * 300, "a..b", "no host"])
def test_a_host_that_is_no_name_is_refused(tmp_path, config, capsys, monkeypatch, host):
    monkeypatch.setenv("TIDE_GATEWAY_TOKENS", "ann:0123456789abcdef")
    options = ["--config", str(config), "--port", "0", "--database", f"sqlite:///{tmp_path / 'gateway.db'}"]
    assert main(["serve", *options, "--host", host]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_two_names_of_one_file_are_one_database(gateways, tmp_path, config):
    gateways()
    (tmp_path / "other.db").symlink_to(tmp_path / "gateway.db")
    argv = [sys.executable, "-m", "tide_gateway", "serve", "--config", str(config), "--port", "0"]
    argv += ["--database", f"sqlite:///{tmp_path / 'other.db'}"]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert second.returncode == 2
    assert "another gateway uses" in second.stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"command": ("serve", "{uds}", "a\0b")}, "NUL"),
        ({"command": ("serve", "{uds}"), "env": {"A": "a\0b"}}, "NUL"),
        ({"command": ("serve", "{uds}"), "env": {"A=B": "c"}}, "equals sign"),
        ({"command": ("", "{uds}")}, "command: missing"),
    ],
)
def test_what_no_process_can_be_started_with_is_refused(values, words):
    problem = EnvironmentSpec(name="scripted", **values).problem()
    assert problem is not None
    assert words in problem
