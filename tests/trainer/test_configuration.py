from __future__ import annotations

import json
import socket
import sqlite3
import sys
import tomllib
from pathlib import Path

import pytest

from tide_trainer import cli
from tide_trainer.config_file import load
from tide_trainer.errors import ConfigurationError
from tide_trainer.persistence.migrate import migrate_database
from tide_trainer.run_directory import new_run_directory
from tide_trainer.settings import RunSettings

ROOT = Path(__file__).parents[2]
FAKE = """
[tasks]
environment = "babyai"
[rollout]
engine = "fake"
[train]
backend = "fake"
[gateway]
environments = "{root}/examples/environments.toml"
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.toml"
    path.write_text(FAKE.format(root=ROOT))
    return path


@pytest.mark.parametrize(
    ("override", "field", "fix"),
    [
        ("rollout.kv_token=1", "rollout.kv_token", "unknown key"),
        ("rolout.engine=fake", "rolout", "unknown key"),
        ("run.max_train_steps=many", "run.max_train_steps", "integer"),
        ("rollout.temperature=0", "rollout.temperature", "greater than 0"),
        ("algorithm.eta=-1", "algorithm.eta", "greater than or equal to 0"),
        ("run.name=a/b", "run.name", "pattern"),
        ("rollout.engine=vllm", "", "both be 'fake'"),
        ("rollout.kv_tokens=100", "", "raise kv_tokens"),
        ("rollout.min_ranks=2", "", "min_ranks"),
        ("rollout.max_new_tokens=512", "", "max_new_tokens"),
        ("tasks.train_seed=1100", "tasks", "held-out"),
        ("algorithm.group_size=1", "algorithm", "min_group_size"),
        ("algorithm.loss.kl_coefficient=0.1", "algorithm", "Ref ranks"),
        ("algorithm.loss.policy=reinforce", "algorithm", "unclipped"),
        ("warm_start.enabled=true", "", "demonstrator"),
        ("model.path=nowhere", "model.path", "config.json"),
        ("model.words=tide_environments.babyai:none", "model.words", "no function"),
        ("model={vision=true, hidden_size=64}", "model", "32 * num_heads"),
        ("model={vision=true, path='x'}", "model", "leave it out"),
        ("agent.entry=no_such_module:agent", "agent.entry", "cannot be imported"),
        ("agent.entry=json:dumps", "agent.entry", "@agent"),
        ("gateway.environments=nowhere.toml", "gateway.environments", "is no file"),
        ("tasks.environment=babyia", "tasks.environment", "babyai"),
        ("run.database_url=mysql://x/y", "run.database_url", "sqlite"),
        ("run.database_url=sqlite:////no/such/folder/x.db", "run.database_url", "cannot be opened"),
        ("train.learning_rate=inf", "train.learning_rate", "finite"),
        ("agent.task_timeout_s=inf", "agent.task_timeout_s", "finite"),
        ("run.max_time_s=nan", "run.max_time_s", "finite"),
        ("train.betas=[0.9, 1.5]", "train.betas.1", "less than 1"),
        ("tasks.train_seed=99999999999999999999", "tasks.train_seed", "less than"),
        ("run.seed=99999999999999999999", "run.seed", "less than"),
        ("gateway.url=http://127.0.0.1:1", "gateway.url", "no gateway that answers"),
        ("gateway.url=nonsense", "gateway.url", "no gateway that answers"),
        ('run.directory="a?b"', "run.directory", "choose another folder"),
        ('run.directory="a\\u0000b"', "run.directory", "choose another folder"),
        ("nonsense", "--set nonsense", "section.key=value"),
        ("run.name.first=1", "run.name", ""),
    ],
)
def test_a_wrong_setting_ends_with_code_2_and_names_the_field_and_the_fix(config, capsys, override, field, fix):
    assert cli.main(["run", str(config), "--set", override]) == 2
    error = capsys.readouterr().err
    assert field in error
    assert fix in error
    assert not (config.parent / "runs").exists(), "nothing was started"


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path, capsys):
    assert cli.main(["run", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err
    (tmp_path / "bad.toml").write_text("a = = 1")
    assert cli.main(["run", str(tmp_path / "bad.toml")]) == 2
    assert "not valid TOML" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "field", "fix"),
    [
        ({"config.json": {"model_type": "llava", "vision_config": {}}}, "model.path", "qwen2_vl, qwen2_5_vl"),
        ({"config.json": {"model_type": "qwen2_vl", "image_token_id": 7}}, "model.path", "preprocessor_config.json"),
        (
            {
                "config.json": {"model_type": "qwen2_vl", "image_token_id": 7},
                "preprocessor_config.json": {"min_pixels": 28 * 28 * 625},
                "tokenizer.json": {"added_tokens": [{"id": 7, "content": "<|image_pad|>"}]},
            },
            "rollout.max_context_tokens",
            "takes 625 tokens, and prompts may have 508",
        ),
    ],
    ids=["another family", "a file is missing", "no room"],
)
def test_a_model_of_images_that_cannot_be_used_is_found_before_anything_starts(config, capsys, files, field, fix):
    folder = config.parent / "seeing"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert cli.main(["run", str(config), "--set", f"model.path={folder}"]) == 2
    error = capsys.readouterr().err
    assert field in error
    assert fix in error
    assert not (config.parent / "runs").exists()


def test_a_port_in_use_is_found_before_anything_starts(config, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["run", str(config), "--set", f"gateway.port={port}"]) == 2
    assert "gateway.port" in capsys.readouterr().err


def test_a_database_of_a_newer_version_is_refused_untouched(config, capsys):
    path = config.parent / "newer.sqlite3"
    migrate_database(f"sqlite:///{path}")
    with sqlite3.connect(path) as database:
        database.execute("update trainer_alembic_version set version_num = 'trainer_9999'")
    assert cli.main(["run", str(config), "--set", f"run.database_url=sqlite:///{path}"]) == 2
    error = capsys.readouterr().err
    assert "trainer_9999" in error
    assert "newer version" in error
    assert not (config.parent / "runs").exists()


def test_a_dry_run_prints_the_resolved_settings_and_starts_nothing(config, capsys):
    assert cli.main(["run", str(config), "--dry-run", "--max-steps", "3", "--set", "run.seed=5"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["run"]["max_train_steps"] == 3
    assert printed["run"]["seed"] == 5
    assert not (config.parent / "runs").exists()


def test_the_printed_settings_are_a_configuration_again(config, tmp_path, capsys):
    cli.main(["run", str(config), "--dry-run"])
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load(again) == load(config)


@pytest.mark.parametrize("name", ["quickstart.toml", "goto_local.toml"])
def test_the_shipped_configurations_are_right(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load(Path("examples") / name).warm_start.enabled


def test_overrides_are_toml_values_and_bare_words_are_strings(config):
    settings = load(config, ["run.name=abc", "train.betas=[0.8, 0.99]", "tasks.parameters={level = 'x'}"])
    assert settings.run.name == "abc"
    assert settings.train.betas == (0.8, 0.99)
    assert settings.tasks.parameters == {"level": "x"}


def test_r3_a_fresh_run_never_gets_the_folder_of_an_older_one(tmp_path):
    settings = RunSettings(directory=str(tmp_path), name="a")
    assert [new_run_directory(settings).name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"run\.directory"):
        new_run_directory(RunSettings(directory=str(tmp_path / "file" / "runs"), name="a"))


def test_a_model_folder_without_a_tokenizer_is_named_before_anything_starts(config, capsys):
    (config.parent / "model").mkdir()
    (config.parent / "model" / "config.json").write_text("{}")
    assert cli.main(["run", str(config), "--set", "model.path=model"]) == 2
    assert "model.path" in capsys.readouterr().err
    assert not (config.parent / "runs").exists()


def test_a_temporary_folder_too_long_for_sockets_is_named(config, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 90)
    assert cli.main(["run", str(config)]) == 2
    assert "TMPDIR" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "0.0", "0.7", "1.5", "nan"])
def test_s5_a_temperature_that_cannot_be_trained_is_refused_when_the_configuration_is_read(config, value):
    with pytest.raises(ConfigurationError, match=r"rollout\.temperature"):
        load(config, [f"rollout.temperature={value}"])


def test_modules_beside_the_configuration_are_found_whatever_the_working_directory_is(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "project"
    (folder / "players").mkdir(parents=True)
    (folder / "players" / "beside.py").write_text("from tide_sdk.agents import chat_agent as play\n")
    (folder / "config.toml").write_text(FAKE.format(root=ROOT) + '[agent]\nentry = "players.beside:play"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["run", str(folder / "config.toml"), "--dry-run"]) == 0
    capsys.readouterr()
    override = ["--set", "agent.entry=players.nobody:play"]
    assert cli.main(["run", str(folder / "config.toml"), "--dry-run", *override]) == 2
    told = capsys.readouterr().err
    assert "agent.entry" in told
    assert "players.nobody" in told
    assert str(folder) in told
    assert str(tmp_path / "elsewhere") in told


def test_a_window_that_keeps_as_many_images_as_it_allows_is_refused(config):
    assert (load(config, []).agent.max_images, load(config, []).agent.keep_images) == (10, 5)
    assert load(config, ["agent.max_images=0"]).agent.max_images == 0
    with pytest.raises(ConfigurationError, match=r"keep_images 5 must be below max_images 4"):
        load(config, ["agent.max_images=4"])
