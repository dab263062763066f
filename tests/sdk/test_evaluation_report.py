"""Summary and page of an evaluation: what is counted, and that nothing of it is obeyed by a browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re

import pytest
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st

from tide_sdk.evaluation.folder import EvaluationFailed, EvaluationFolder
from tide_sdk.evaluation.records import Record
from tide_sdk.evaluation.report import finish
from tide_sdk.evaluation.summary import NUM_BINS, histogram, summarise

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()


def some_records():
    return [
        Record("1", 0, "completed", 1.0, 3, split="test", group="easy"),
        Record("1", 1, "completed", 0.0, 5, split="test", group="easy"),
        Record("2", 0, "truncated", 0.5, 9, split="train", group="hard"),
        Record("2", 1, "infrastructure", None, 0, split="train", group="hard", error="no answer\nat all"),
        Record("3", 0, "agent_error", None, 1, split="train", error="no answer"),
    ]


def test_a_play_without_a_reward_is_told_and_never_counted_as_a_zero():
    summary = summarise(some_records(), num_tasks=3, repeats=2)
    overall = summary.overall
    assert (overall.num, overall.num_played, overall.num_planned) == (3, 5, 6)
    assert overall.reward.value == pytest.approx(0.5)
    assert overall.success.value == pytest.approx(2 / 3)
    assert overall.success_bounds == (pytest.approx(2 / 6), pytest.approx(5 / 6))
    assert summary.outcomes == {"completed": 2, "truncated": 1, "infrastructure": 1, "agent_error": 1, "not played": 1}
    assert set(summary.reasons) == {("infrastructure", "no answer", 1), ("agent_error", "no answer", 1)}
    assert not summary.complete
    assert overall.pass_at[1].value == pytest.approx((0.5 + 1.0) / 2)
    assert (overall.pass_at[2].value, overall.pass_at[2].num_tasks) == (1.0, 1)
    assert {name: found.num for name, found in summary.splits.items()} == {"test": 2, "train": 1}
    assert {name: found.num for name, found in summary.groups.items()} == {"easy": 2, "hard": 1}


def test_success_is_a_reward_above_the_threshold():
    assert summarise(some_records(), num_tasks=3, repeats=2, threshold=0.5).overall.success.value == pytest.approx(
        1 / 3
    )


def test_nothing_played_is_a_summary_too():
    summary = summarise([], num_tasks=2, repeats=1)
    assert (summary.overall.num, summary.overall.success, summary.complete) == (0, None, False)
    json.dumps(summary.plain())


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.booleans())
def test_every_value_is_in_one_bin(values, whole):
    values = [float(round(value)) for value in values] if whole else values
    bins = histogram(values, whole=whole)
    assert sum(count for _, _, count in bins) == len(values)
    assert len(bins) <= NUM_BINS + 1
    assert all(low <= high for low, high, _ in bins)
    assert all(first[1] <= second[0] + 1e-6 for first, second in itertools.pairwise(bins))


@pytest.fixture
def report(tmp_path):
    """Writes an evaluation of these records; (page, its text)."""

    def write(records, **more):
        definition = {"environment": "e", "model": "m", "tasks": {"num": 3}, "repeats": 2, "threshold": 0.0} | more
        with EvaluationFolder(tmp_path / "out", definition, resume=False) as folder:
            for record in records:
                folder.add(record)
        finish(tmp_path / "out")
        text = (tmp_path / "out" / "report.html").read_text()
        return Page(text), text

    return write


def test_the_page_shows_the_figures_and_needs_nothing_from_elsewhere(report):
    page, text = report(some_records())
    words = "".join(page.words)
    for told in ("66.7% of 3 plays of 2 tasks succeeded", "3 of 6", "pass@2", "incomplete", "By split", "no answer"):
        assert told in words
    assert "between 33.3%" in words
    assert not [name for name, _ in page.seen if name in ("link", "iframe", "object", "base")]
    loads = [value for _, found in page.seen for name, value in found.items() if name in ("src", "href", "action")]
    assert loads == []
    assert "url(" not in text
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in text, "the policy lets no other run"
    assert "prefers-color-scheme: dark" in text


def test_what_comes_from_outside_is_escaped_everywhere(report):
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[2J\x00"
    call = {"id": "1", "type": "function", "function": {"name": evil, "arguments": evil}}
    messages = [
        {"role": evil, "content": evil},
        {"role": "assistant", "content": None, "tool_calls": [call, "odd"], "reasoning_content": evil},
        {"role": "user", "content": [{"type": "text", "text": evil}, {"type": evil}, 7, {"type": "image_url"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://elsewhere.example/a.png"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f'data:image/png;base64,"{evil}'}}]},
    ]
    lost = Record("2", 0, "agent_error", None, 1, error=evil, messages=messages)
    page, text = report([Record(evil, 0, "completed", 1.0, 1, group=evil, messages=messages), lost], model=evil)
    assert [name for name, _ in page.seen].count("script") == 1
    images = [found for name, found in page.seen if name == "img"]
    assert len(images) == 2
    assert {found["src"] for found in images} == {f"data:image/png;base64,{PIXEL}"}
    assert not [name for _, found in page.seen for name in found if name.startswith("on")]
    assert "\x1b" not in text
    assert "\x00" not in text
    assert evil.replace("\x1b", "\ufffd").replace("\x00", "\ufffd") in "".join(page.words)


def test_a_large_image_is_named_and_not_shown(report):
    url = "data:image/png;base64," + "A" * 600_000
    part = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    page, text = report([Record("1", 0, "completed", 1.0, 1, messages=[part])])
    assert "450,000 bytes, not shown" in "".join(page.words)
    assert len(text) < 100_000


def test_a_table_of_tasks_can_be_sorted_by_numbers(report):
    page, _ = report([Record(name, 0, "completed", 1.0, 1) for name in ("10", "9", "b", "a")])
    cells = [found["data-sort"] for name, found in page.seen if name == "td" and "data-sort" in found]
    assert cells[:: len(cells) // 4] == ["9", "10", "a", "b"]
    heads = [found for name, found in page.seen if name == "th" and "aria-sort" in found]
    assert [name for name, _ in page.seen].count("button") == len(heads) > 0


def test_a_folder_without_an_evaluation_has_no_report(tmp_path):
    with pytest.raises(EvaluationFailed, match=r"manifest.json: cannot be read"):
        finish(tmp_path)
