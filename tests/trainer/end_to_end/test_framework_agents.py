"""The agents of `examples/agents` train by naming them, and play without a trainer, unchanged."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from toy_environment import words

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def talkative(toy_model, tmp_path) -> Path:
    """The toy's model, which says a word and ends: frameworks forget empty answers, a break, or refuse them."""
    folder = shutil.copytree(toy_model, tmp_path / "talkative")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = [tokenizer.token_to_id(word) for word in words()]
    table = np.full_like(load_file(folder / "model.safetensors")["logits"], -30)
    table[:, known] = 0
    table[known] = -30
    table[known, tokenizer.token_to_id("<end>")] = 0
    save_file({"logits": table}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["openai_agent", "pydantic_ai_agent"])
def test_an_agent_beside_the_configuration_trains_without_a_break(name, project, talkative):
    # Neither the working directory nor the interpreter knows the folder: it is the configuration's.
    folder = project.folder / "settings"
    shutil.copytree(EXAMPLES / "agents", folder / "agents")
    project.config = project.config.rename(folder / "toy.toml")
    overrides = [f"agent.entry=agents.{name}:play", f"model.path={talkative}", "tasks.num_eval=2"]
    overrides += ["evaluation.every_train_steps=0", "evaluation.greedy=never", "evaluation.num_samples=0"]
    code, out = project.run("--max-steps", "2", *(word for setting in overrides for word in ("--set", setting)))
    assert code == 0, out[-3000:]
    steps = [record for record in project.records() if record["event"] == "train_step"]
    assert project.last("end")["account"].keys() <= {"trained", "dropped: the run ended first"}, out[-3000:]
    assert [step["num_breaks"] for step in steps] == [0, 0]
    assert [step["num_sequences"] for step in steps] == [16, 16]
    assert {step["mean_turns"] for step in steps} == {4.0}
    with sqlite3.connect(project.folder / "runs" / "toy" / "trainer.sqlite3") as database:
        outcomes = {outcome for (outcome,) in database.execute("select distinct outcome from trajectories")}
    assert outcomes == {"completed"}
    assert project.left_over() == []
