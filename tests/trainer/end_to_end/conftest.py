"""Whole runs of `tide-train` on the fake engine and backend, as child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_environment import words

from tide_trainer.backends.fake_training import make_fake_model
from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model

SUPPORT = Path(__file__).parents[2] / "support"
PATH = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))

CONFIG = """
[run]
name = "toy"
directory = "{folder}/runs"
max_train_steps = 4
[model]
path = "{model}"
[gateway]
environments = "{folder}/environments.toml"
[tasks]
environment = "toy"
num_eval = 16
[rollout]
engine = "fake"
kv_tokens = 8192
max_context_tokens = 64
max_new_tokens = 2
ready_timeout_s = 60
probe_interval_s = 0.5
[algorithm]
groups_per_batch = 4
group_size = 4
[train]
backend = "fake"
learning_rate = 0.2
[evaluation]
every_train_steps = 2
"""

ENVIRONMENTS = """
[environments.toy]
command = ["tide-env", "serve", "toy_environment:Toy", "--uds", "{{uds}}", "--set", "delay_s={delay_s}",
  "--set", "fail_every={fail_every}", "--set", "eval_flag={eval_flag}", "--capacity", "{{capacity}}"]
capacity = 256
"""


class Project:
    """A folder with a configuration; starts runs and reads what they leave."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.config = folder / "toy.toml"
        self.config.write_text(CONFIG.format(folder=folder, model=model))
        self.environment_delay(0)

    def environment_delay(self, delay_s: float, fail_every: int = 0, eval_flag: Path | None = None) -> None:
        """Makes each turn of the environment last so long, and every so-manieth of its tasks fail.

        No turn of a held-out task ends before the file `eval_flag` is there.
        """
        text = ENVIRONMENTS.format(delay_s=delay_s, fail_every=fail_every, eval_flag=eval_flag or "")
        (self.folder / "environments.toml").write_text(text)

    def start(self, *arguments: str, command: str = "run") -> subprocess.Popen[str]:
        """Starts `tide-train`; the marker variable finds what it leaves behind."""
        return subprocess.Popen(
            [sys.executable, "-m", "tide_trainer.cli", command, str(self.config), *arguments],
            env=os.environ | {"PYTHONPATH": PATH, "TIDE_TEST_MARK": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            start_new_session=True,
        )

    def run(self, *arguments: str, command: str = "run", timeout_s: float = 100) -> tuple[int, str]:
        """Runs `tide-train` to its end; returns exit code and output."""
        process = self.start(*arguments, command=command)
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            pytest.fail(f"tide-train did not end in {timeout_s} s:\n{out[-3000:]}")
        return process.returncode, out

    def records(self, name: str = "toy") -> list[dict]:
        """The run's metrics."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def last(self, event: str, name: str = "toy") -> dict:
        """The last record of an event."""
        return next(record for record in reversed(self.records(name)) if record["event"] == event)

    def wait_for(self, process: subprocess.Popen[str], seen, timeout_s: float = 60) -> None:
        """Waits until `seen(records)` holds while the run is alive."""
        end_s = time.monotonic() + timeout_s
        while not seen(self.records()):
            if process.poll() is not None:
                pytest.fail(f"the run ended early:\n{process.stdout.read()[-3000:]}")
            if time.monotonic() > end_s:
                os.killpg(process.pid, signal.SIGKILL)
                pytest.fail(f"not seen in {timeout_s} s: {self.records()[-3:]}")
            time.sleep(0.02)

    def left_over(self, patience_s: float = 5) -> list[int]:
        """Live processes that this project's runs started; the guard of a run may outlive it for a moment."""
        end_s = time.monotonic() + patience_s
        while (found := self.children("")) and time.monotonic() < end_s:
            time.sleep(0.05)
        return found

    def children(self, part: str) -> list[int]:
        """Process ids of this project's live processes whose command line holds `part`."""
        mark, found = f"TIDE_TEST_MARK={self.folder}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and mark in (entry / "environ").read_bytes()
                    and part.encode() in (entry / "cmdline").read_bytes()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fakes' model over the toy's words, made once: runs that made their own would each import transformers."""
    folder = make_tiny_model(tmp_path_factory.mktemp("toy_model"), words(), TinyModel(hidden=32, layers=1))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return make_fake_model(folder, vocabulary)


@pytest.fixture
def project(tmp_path: Path, toy_model: Path) -> Project:
    """A fresh folder with the toy configuration."""
    return Project(tmp_path, toy_model)
