from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from recorded_examples import browser_task, png

from tide_trainer import cli
from tide_trainer.images import ImageStore
from tide_trainer.report import replay_list, replay_messages, replay_page, replay_tokens
from tide_trainer.report.html import write_report
from tide_trainer.report.recorded import RecordedTrajectory
from tide_trainer.report.replay_list import main_trajectory
from tide_trainer.report.replay_page import render_trajectory

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)"></style>{{ 7 * 7 }}\'"&lt;'


def rendered(folder: Path, data: dict[str, Any]) -> str:
    return render_trajectory(RecordedTrajectory.model_validate(data), folder / "images")


def keep(folder: Path, data: dict[str, Any], name: str = "train.17.3") -> Path:
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    path = folder / "trajectories" / f"{name}.json"
    path.write_text(json.dumps(data))
    return path


def test_the_page_shows_a_task_turn_by_turn(tmp_path: Path) -> None:
    page = Page(rendered(tmp_path, browser_task(tmp_path / "images")))
    assert len(page.of("article", "step")) == 1 + 6
    assert len(page.of("img")) == 6
    assert str(page.of("svg")[0]["aria-label"]).startswith("Footprint of 6 calls; the last one: cached")
    for told in (
        "train/17/3", "environment shop", "seed 1017", "0.75", "attempt 2", "the worker is gone", "4, 5",
        "1,890 of 1,920 are used, 3 calls wait", "fits after 3.5 s", "Segment break.",
        "tool result of click", "held 3.55 s, engine 0.44 s", "reasoning, 53 characters",
    ):  # fmt: skip
        assert told in page.text, told


def test_sampled_tokens_carry_their_numbers_and_others_are_pale(tmp_path: Path) -> None:
    data = browser_task()
    first = data["segments"][0]
    first["logprobs"][27:30] = [-0.01, -5.0, None]
    first["texts"][28] = "a\nb"
    text = rendered(tmp_path, data)
    ids = first["token_ids"]
    assert (
        f'<i class="k p0 v1" title="token {ids[27]} · log-prob -0.010 · 99% · version 4">&lt;think&gt;The </i>' in text
    )
    assert f'<i class="k p4 v1" title="token {ids[28]} · log-prob -5.000 · 0.674% · version 4">a<b>↵</b>\nb</i>' in text
    assert f'<i class="k pq v1" title="token {ids[29]} · version 4">' in text
    assert f'<u title="token {ids[0]}">&lt;system&gt; </u>' in text
    assert len(Page(text).of("i", "k p")) == sum(sum(s["sampled"]) for s in data["segments"]) + 6, "and the legend's"
    assert 'class="k p0 v2"' in text


def test_nothing_from_the_run_becomes_markup(tmp_path: Path) -> None:
    data = browser_task(tmp_path / "images")
    for key in ("run", "uid", "group", "environment", "split", "outcome", "error", "started_at"):
        data[key] = EVIL
    data["task"] = data["metrics"] = {EVIL: EVIL}
    data["earlier_attempts"][0].update(outcome=EVIL, error=EVIL)
    data["left_out"] = [EVIL]
    for event in data["events"]:
        event.update(reason=EVIL, rank=EVIL)
    for turn in data["turns"]:
        turn.update(reason=EVIL, rank=EVIL, finish_reason=EVIL)
    data["segments"][0]["texts"] = [EVIL] * len(data["segments"][0]["texts"])
    data["messages"] += [
        {"role": EVIL, "name": EVIL, "content": EVIL, EVIL: EVIL},
        {"role": "assistant", "content": [{"type": "text", "text": EVIL}, {"type": EVIL}], "reasoning": {EVIL: EVIL},
         "tool_calls": [{"id": EVIL, "function": {"name": EVIL, "arguments": json.dumps({EVIL: EVIL})}}, EVIL]},
        {"role": "tool", "tool_call_id": EVIL, "content": [{"type": "image", "error": EVIL}]},
        {"role": "user", "content": [{"type": "image", "digest": f'"><script>{EVIL}'}]},
    ]  # fmt: skip
    page = Page(rendered(tmp_path, data))
    assert len(page.of("script")) == 1
    assert len(page.of("style")) == 1
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.of("img"))
    assert not any(key.startswith("on") for _, attributes in page.seen for key in attributes)
    assert page.text.count(EVIL) > 30


def test_the_page_needs_nothing_from_elsewhere_and_forbids_it(tmp_path: Path) -> None:
    data = browser_task(tmp_path / "images")
    data["messages"][1]["content"] = [{"type": "image_url", "image_url": {"url": "https://elsewhere.example/x.png"}}]
    text = rendered(tmp_path, data)
    page = Page(text)
    assert not {tag for tag, _ in page.seen} & {"link", "iframe", "object", "embed", "form", "base"}
    for _, attributes in page.seen:
        assert (attributes.get("src") or "data:").startswith("data:")
        assert (attributes.get("href") or "#").startswith("#")
    script = text.split("<script>")[1].split("</script>")[0]
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy.replace("&#43;", "+").replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; img-src data:;")
    styles = text.split("<style>")[1].split("</style>")[0]
    assert "url(" not in styles
    assert "@import" not in styles


def test_every_link_on_the_page_leads_somewhere(tmp_path: Path) -> None:
    data = browser_task(tmp_path / "images")
    data["messages"].append({"role": "user", "content": list(data["messages"][3]["content"])})
    digest = ImageStore(tmp_path / "images").put(png(3, 3, 200))
    data["segments"][1]["images"].append({"start": 0, "num_tokens": 2, "digest": digest})
    data["segments"][1]["images"].sort(key=lambda image: image["start"])
    page = Page(rendered(tmp_path, data))
    anchors = [found["id"] for _, found in page.seen if found.get("id")]
    assert len(set(anchors)) == len(anchors)
    links = [found["href"] for found in page.of("a")]
    assert f"#image-{digest[:16]}" in links
    assert {str(link)[1:] for link in links} <= set(anchors)
    assert "in no message" in page.text
    assert "shown above" in page.text


def test_missing_damaged_and_strange_images_are_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    data = browser_task(tmp_path / "images")
    paths = [tmp_path / "images" / image["digest"] for image in data["segments"][0]["images"]]
    paths[0].unlink()
    paths[1].write_bytes(b"other bytes")
    svg = ImageStore(tmp_path / "images").put(b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>")
    data["messages"].append({"role": "user", "content": [{"type": "image", "digest": svg}]})
    page = Page(rendered(tmp_path, data))
    assert len(page.of("img")) == 4
    assert "is not in" in page.text
    assert "does not hold the bytes of its name" in page.text
    assert "no PNG, JPEG, GIF or WebP" in page.text
    assert "Left out: 3 images that cannot be read." in page.text


def test_a_page_stays_within_its_bounds_and_says_what_it_leaves_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(replay_page, "MAX_ITEMS", 4)
    monkeypatch.setattr(replay_page, "MAX_ONE_IMAGE_BYTES", 100)
    monkeypatch.setattr(replay_tokens, "MAX_SPANS", 30)
    monkeypatch.setattr(replay_tokens, "MAX_PLAIN_CHARS", 50)
    monkeypatch.setattr(replay_messages, "MAX_TEXT", 40)
    page = Page(rendered(tmp_path, browser_task(tmp_path / "images")))
    for told in ("2 turns at the end", "images beyond the page's bound", "long texts, cut", "tokens without colours",
                 "stretches of tokens, cut"):  # fmt: skip
        assert told in page.text, told
    assert len(page.of("i", "k p")) == 30 + 6
    assert page.of("img") == []


def test_fifty_turns_of_thirty_thousand_tokens_and_fifty_images(tmp_path: Path) -> None:
    data = browser_task(tmp_path / "images", num_turns=50, words=510, size=(64, 48))
    num_tokens = sum(len(segment["token_ids"]) for segment in data["segments"])
    assert num_tokens > 30_000
    record = RecordedTrajectory.model_validate(data)
    began_s = time.process_time()
    text = render_trajectory(record, tmp_path / "images")
    assert time.process_time() - began_s < 10
    images = sum(path.stat().st_size for path in (tmp_path / "images").iterdir())
    assert len(text) < 60 * num_tokens + 1.4 * images + 400_000
    assert "Left out" not in text
    assert len(Page(text).of("img")) == 50


@pytest.mark.parametrize("missing", ["turns", "events", "messages", "segments", "rewards", "metrics"])
def test_a_recording_without_a_part_still_gets_a_page(tmp_path: Path, missing: str) -> None:
    empty: Any = {} if missing == "metrics" else []
    page = Page(rendered(tmp_path, browser_task(tmp_path / "images") | {missing: empty}))
    assert "train/17/3" in page.text


def test_the_command_writes_lists_and_finds(tmp_path: Path, capsys) -> None:
    keep(tmp_path, browser_task())
    newer = keep(tmp_path, browser_task() | {"uid": "eval/0/sampled/1", "kind": "eval"}, "eval.0.sampled.1")
    os.utime(newer, (2e9, 2e9))
    assert cli.main(["trajectory", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(newer.with_suffix(".html"))
    assert cli.main(["trajectory", str(tmp_path), "train/17/3", "--out", str(tmp_path / "x.html")]) == 0
    assert "train/17/3" in Page((tmp_path / "x.html").read_text()).text
    (tmp_path / "trajectories" / "broken.json").write_text("{")
    capsys.readouterr()
    assert cli.main(["trajectory", str(tmp_path), "--list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split() == ["eval/0/sampled/1", "eval", "completed", "0.75", "6", "2", "4,5"]
    assert "broken.json" in rows[-1]
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train/17/4"], "'train/17/4' is not among the 1 recorded trajectories; near it: train/17/3"),
        (["../../x"], "near it: train/17/3"),
        (["train/17/3", "--out", "nowhere/x.html"], "cannot be written"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, capsys, monkeypatch, arguments, told: str) -> None:
    monkeypatch.chdir(tmp_path)
    keep(tmp_path, browser_task())
    assert cli.main(["trajectory", str(tmp_path), *arguments]) == 2
    assert told in capsys.readouterr().err
    assert main_trajectory(tmp_path / "nowhere", None) == 2
    assert "no trajectory is recorded" in capsys.readouterr().err


def test_the_report_leads_to_the_pages_of_its_samples_first(make_run, records, samples, monkeypatch) -> None:
    monkeypatch.setattr(replay_list, "MAX_PAGES", 2)
    folder = make_run(records, samples)
    uid = samples[0]["uid"]
    for number, one in enumerate(("a/1", "b/2", uid)):
        keep(folder, browser_task() | {"uid": one}, one.replace("/", ".") if number else "a.1")
    keep(folder, {"format": 1}, "b.2")
    page = Page(write_report(folder).read_text())
    links = [found["href"] for found in page.of("a")]
    assert links.count(f"trajectories/{uid.replace('/', '.')}.html") >= 2, "beside the sample, and in the list"
    assert all((folder / str(link)).is_file() for link in links)
    assert "1 more are recorded: tide-train trajectory quickstart --list" in page.text
    assert not (folder / "trajectories" / "b.2.html").exists()
