"""Checkpoints that are not whole are refused by their file's name before anything is started."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tide_trainer.backends import whole_files
from tide_trainer.errors import ConfigurationError
from tide_trainer.evaluate import Order, evaluate, settings_for
from tide_trainer.model_files import vocab_size
from tide_trainer.settings import TrainerSettings

HEADER = json.dumps({"logits": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
WHOLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(16)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 2}')
    (folder / whole_files.WEIGHTS).write_bytes(WHOLE)
    return folder


@pytest.fixture
def settings() -> TrainerSettings:
    return TrainerSettings.model_validate({"tasks": {"environment": "toy"}})


def test_a_whole_one_passes(checkpoint):
    whole_files.check_weights(checkpoint)
    assert whole_files.saved_place(str(checkpoint)) is None
    assert vocab_size(checkpoint) == 2


@pytest.mark.parametrize("num_bytes", [0, 4, 20, len(WHOLE) - 1])
def test_weights_that_were_cut_off(checkpoint, num_bytes):
    (checkpoint / whole_files.WEIGHTS).write_bytes(WHOLE[:num_bytes])
    with pytest.raises(ConfigurationError, match=r"model\.safetensors.*copy the model folder again"):
        whole_files.check_weights(checkpoint)


def test_weights_that_are_missing(checkpoint):
    (checkpoint / whole_files.WEIGHTS).unlink()
    with pytest.raises(ConfigurationError, match="has no weights"):
        whole_files.check_weights(checkpoint)


def test_a_part_that_the_index_names_is_missing(checkpoint):
    index = {"weight_map": {"a": "model-1.safetensors", "b": whole_files.WEIGHTS}}
    (checkpoint / f"{whole_files.WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=r"model-1\.safetensors: cannot be read"):
        whole_files.check_weights(checkpoint)


@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"format": 7}'])
def test_a_state_that_no_release_wrote(checkpoint, text):
    (checkpoint / whole_files.STATE_JSON).write_text(text)
    with pytest.raises(ConfigurationError, match=r"trainer_state\.json"):
        whole_files.saved_place(str(checkpoint))


@pytest.mark.parametrize("text", ["{}", '{"vocab_size": "2"}', '{"text_config": [2]}', '{"text_config": {}}'])
def test_a_configuration_without_a_vocabulary(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"config\.json has no vocab_size"):
        vocab_size(checkpoint)


def test_a_folder_that_the_system_refuses_is_named_with_its_reason(settings):
    with pytest.raises(ConfigurationError, match=r"--checkpoint: .*File name too long"):
        settings_for(settings, Path("a" * 300))


def test_a_link_to_nothing_in_the_folder_is_named(settings, checkpoint, tmp_path):
    (checkpoint / "vocab.txt").symlink_to("nowhere")
    settings = settings_for(settings, checkpoint)
    with pytest.raises(ConfigurationError, match=r"vocab\.txt: No such file"):
        asyncio.run(evaluate(settings, Order(checkpoint, ("sampled",), out=tmp_path / "out")))
