"""A whole run on the fake engine and backend, its main process killed -9 again and again: `make soak-resume`.

Each life is resumed from what the one before left, and killed at a random moment: while it boots, trains or saves.
In the end every prompt must have trained once or be dropped with a reason, each train step must have had its
batch within the staleness bound, and nothing may be left open at the gateway. The last line is JSON.

    make soak-resume ARGS="--kills 3 --train-steps 10"
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
BATCH, SIBLINGS = 4, 4
LIFE_LIMIT_S = 300.0
CONFIG = """
[run]
name = "toy"
directory = "{folder}/runs"
max_train_steps = {steps}
[model]
path = "{model}"
[gateway]
environments = "{folder}/environments.toml"
[tasks]
environment = "toy"
num_eval = 4
[rollout]
engine = "fake"
kv_tokens = 8192
max_context_tokens = 64
max_new_tokens = 2
[algorithm]
groups_per_batch = {batch}
group_size = {siblings}
eta = {eta}
spare_groups = {spare}
spare_siblings = {spare}
[train]
backend = "fake"
checkpoint_every = {checkpoint_every}
[evaluation]
every_train_steps = 0
[report]
trajectories_every = 0
"""
ENVIRONMENTS = """
[environments.toy]
command = ["tide-env", "serve", "toy_environment:Toy", "--uds", "{uds}", "--set", "delay_s=0.03",
  "--capacity", "{capacity}"]
capacity = 256
"""


class Run:
    """The folder of a run, and its lives."""

    def __init__(self, folder: Path, model: Path, *, steps: int, eta: int, spare: int, checkpoint_every: int) -> None:
        self.folder, self.steps, self.eta = folder, steps, eta
        self.path = folder / "runs" / "toy"
        words = {"folder": folder, "model": model, "steps": steps, "batch": BATCH, "siblings": SIBLINGS, "eta": eta}
        text = CONFIG.format(**words, spare=spare, checkpoint_every=checkpoint_every)
        (folder / "toy.toml").write_text(text)
        (folder / "environments.toml").write_text(ENVIRONMENTS)

    def start(self) -> subprocess.Popen[str]:
        """The first life, or the next one."""
        begun = (self.path / "trainer.sqlite3").is_file() and self.rows("select count(*) from runs")[0][0]
        if not begun:  # killed before it had a row: nothing to go on with, and the next one would get another name
            shutil.rmtree(self.path, ignore_errors=True)
        words = ["--resume", str(self.path)] if begun else [str(self.folder / "toy.toml")]
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-m", "tide_trainer.cli", "run", *words],
            env=os.environ | {"PYTHONPATH": path}, cwd=self.folder, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def rows(self, query: str, database: str = "trainer") -> list[tuple[Any, ...]]:
        """What a query finds; nothing before the tables are made."""
        connection = sqlite3.connect(self.path / f"{database}.sqlite3", timeout=30)
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:
            return [(0,)]
        finally:
            connection.close()

    def num_trained(self) -> int:
        """Train steps that the rows know."""
        path = self.path / "trainer.sqlite3"
        return self.rows("select count(*) from train_steps")[0][0] if path.is_file() else 0

    def killed_life(self, choose: random.Random) -> dict[str, Any]:
        """Starts a life and kills its main process; tells when."""
        process = self.start()
        end_s = time.monotonic() + LIFE_LIMIT_S
        before = self.num_trained()
        moment = "booting" if choose.random() < 0.15 else "training"
        marks = len(self._marks())
        while moment == "training" and len(self._marks()) == marks and process.poll() is None:
            if time.monotonic() > end_s:
                break
            time.sleep(0.02)
        time.sleep(choose.uniform(0.0, 4.0))
        ended = process.poll() is not None
        process.kill()
        out, _ = process.communicate()
        return {
            "moment": moment, "ended_before": ended, "code": process.returncode, "train_steps": self.num_trained(),
            "train_steps_before": before, "out": out[-1500:] if ended and process.returncode else "",
        }  # fmt: skip

    def last_life(self) -> tuple[int, str]:
        """Plays to the end: exit code and output."""
        process = self.start()
        try:
            out, _ = process.communicate(timeout=LIFE_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            return -1, out
        return process.returncode, out

    def _marks(self) -> list[str]:
        path = self.path / "metrics.jsonl"
        text = path.read_text() if path.is_file() else ""
        return [line for line in text.splitlines() if '"phase":"training"' in line]

    def faults(self) -> list[str]:
        """What is wrong with the account of a run that has ended."""
        found: list[str] = []
        groups = self.rows("select uid, status, reason, version, buffer_version from groups")
        indexes = sorted(int(uid.rpartition("/")[2]) for uid, *_ in groups)
        if indexes != list(range(len(groups))):
            found.append(f"prompts are missing or doubled: {indexes}")
        trained = [one for one in groups if one[1] == "trained"]
        found += [f"prompt {one[0]} is {one[1]}" for one in groups if one[1] not in ("trained", "dropped")]
        found += [
            f"prompt {one[0]} is dropped without a reason" for one in groups if one[1] == "dropped" and not one[2]
        ]
        batches = Counter(one[4] for one in trained)
        if batches != Counter(dict.fromkeys(range(self.steps), BATCH)):
            found.append(f"batches are not whole: {dict(batches)}")
        found += [f"group {one[0]} breaks the bound" for one in trained if one[3] + self.eta < one[4]]
        steps = [version for (version,) in self.rows("select model_version from train_steps order by 1")]
        if steps != list(range(1, self.steps + 1)):
            found.append(f"train steps are {steps}")
        if self.rows("select count(*) from staleness_entries") != [(0,)]:
            found.append("staleness entries are left")
        query = 'select t."group", count(*) from trajectories t join groups g on g.uid = t."group" '
        for uid, num in self.rows(query + "where g.status = 'trained' and t.reward is not null group by 1"):
            if num != SIBLINGS:
                found.append(f"group {uid} has {num} rewarded trajectories")
        left = self.rows("select count(*) from tasks where state not in ('ended', 'done')", "gateway")
        if left != [(0,)]:
            found.append(f"{left[0][0]} tasks are open at the gateway")
        return found


def soak(
    folder: Path, model: Path, *, kills: int, steps: int, eta: int = 1, spare: int = 0, checkpoint_every: int = 2,
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Kills that many lives, plays the last to its end, and tells what is wrong."""
    choose = random.Random(seed)  # noqa: S311 - a repeatable choice
    run = Run(folder, model, steps=steps, eta=eta, spare=spare, checkpoint_every=checkpoint_every)
    lives: list[dict[str, Any]] = []
    while len(lives) < kills:
        lives.append(run.killed_life(choose))
        print(json.dumps(lives[-1]), file=sys.stderr, flush=True)
        if lives[-1]["ended_before"]:
            break
    code, out = run.last_life()
    faults = run.faults() if code == 0 else [f"the last life ended with {code}: {out[-3000:]}"]
    faults += [f"a life failed by itself: {one['out']}" for one in lives if one["out"]]
    reasons = run.rows("select reason, count(*) from groups where reason is not null group by 1")
    return {
        "kills": sum(not one["ended_before"] for one in lives), "train_steps": steps, "eta": eta, "spare": spare,
        "checkpoint_every": checkpoint_every, "faults": faults,
        "num_prompts": run.rows("select count(*) from groups")[0][0],
        "num_resumes": run.rows("select num_resumes from runs")[0][0],
        "most_samplings": 1 + run.rows("select max(sampling) from groups")[0][0],
        "reasons": {str(reason): num for reason, num in reasons},
        "lives": [{name: one[name] for name in ("moment", "train_steps_before", "train_steps")} for one in lives],
    }  # fmt: skip


def make_model(folder: Path) -> Path:
    """The fakes' model over the toy's words."""
    sys.path.insert(0, str(SUPPORT))
    from toy_environment import words  # pyright: ignore[reportMissingImports]

    from tide_trainer.backends.fake_training import make_fake_model
    from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model

    made = make_tiny_model(folder, words(), TinyModel(hidden=32, layers=1))
    return make_fake_model(made, json.loads((made / "config.json").read_text())["vocab_size"])


def main() -> int:
    """Plays one run without and one with redundancy; prints the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="lives that are killed, of both runs together")
    parser.add_argument("--train-steps", type=int, default=60, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    details: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="soak-resume-") as name:
        model = make_model(Path(name) / "model")
        for number, spare in enumerate((0, 1)):
            folder = Path(name) / str(number)
            folder.mkdir()
            kills = arguments.kills // 2 if number else arguments.kills - arguments.kills // 2
            words = {"kills": kills, "steps": arguments.train_steps, "spare": spare, "seed": arguments.seed + number}
            details.append(soak(folder, model, **words))
    bad = sum(len(one["faults"]) for one in details)
    kills = sum(one["kills"] for one in details)
    result = {
        "name": "soak-resume", "value": bad, "unit": f"prompts, batches or tasks that are wrong after {kills} kills",
        "goal": 0, "holds": bad == 0 and kills == arguments.kills, "details": details,
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
