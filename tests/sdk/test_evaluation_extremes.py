"""Summary and report of what an evaluation hardly ever holds: huge rewards, thousands of repeats, damaged lines."""

from __future__ import annotations

import json
import math
import time

import pytest

from tide_sdk.evaluation.folder import RESULTS, EvaluationFailed, EvaluationFolder
from tide_sdk.evaluation.records import Record
from tide_sdk.evaluation.report import finish
from tide_sdk.evaluation.summary import summarise
from tide_sdk.statistics import mean_of


def line(**fields) -> bytes:
    return json.dumps({"id": "1", "repeat": 0, "outcome": "completed", "reward": 1.0, "turns": 1} | fields).encode()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "e"
    with EvaluationFolder(path, {"threshold": 0.0, "tasks": {"num": 40}, "repeats": 1}, resume=False):
        return path


@pytest.mark.parametrize("num", [3, 40])
def test_rewards_near_the_largest_float_are_reported(folder, num):
    rewards = [1.7e308 * (-1) ** index / (index + 1) for index in range(num)]
    lines = [line(id=str(index), reward=reward) + b"\n" for index, reward in enumerate(rewards)]
    (folder / RESULTS).write_bytes(b"".join(lines))
    summary = finish(folder)
    assert summary.overall.reward.value == pytest.approx(math.fsum(reward / num for reward in rewards))
    assert sum(count for *_, count in summary.rewards) == num
    json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)


def test_scaling_changes_no_estimate():
    small = mean_of([[1.0, 2.0], [3.0], [-5.0]])
    huge = mean_of([[1e200, 2e200], [3e200], [-5e200]])
    assert [end / 1e200 for end in (huge.value, huge.low, huge.high)] == pytest.approx(
        [small.value, small.low, small.high]
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": "abc"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"metrics": [1]}, "metrics"),
        ({"group": 5}, "group"),
        ({"split": ["a"]}, "split"),
        ({"error": 5}, "error"),
        ({"wall_s": "x"}, "wall_s"),
        ({"reward": True}, "reward"),
        ({"turns": -1}, "turns"),
    ],
)
def test_a_line_with_a_field_of_another_kind_is_named(folder, fields, told):
    (folder / RESULTS).write_bytes(line(id="0") + b"\n" + line(**fields) + b"\n")
    with pytest.raises(EvaluationFailed, match=rf"results.jsonl:2: is no result: .*{told}"):
        finish(folder)


def test_thousands_of_repeats_are_summarised_at_once():
    records = [
        Record(str(task), repeat, "completed", float((task + repeat) % 3 == 0), 1)
        for task in range(2)
        for repeat in range(10_000)
    ]
    began_s = time.process_time()
    passes = summarise(records, num_tasks=2, repeats=10_000).overall.pass_at
    assert time.process_time() - began_s < 10
    assert list(passes)[:64] == list(range(1, 65))
    assert list(passes)[64:] == [128, 256, 512, 1024, 2048, 4096, 8192, 10_000]
    assert passes[1].value == pytest.approx(1 / 3, abs=1e-3)
    assert passes[10_000].value == 1.0
