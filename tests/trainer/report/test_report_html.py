from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from html_page import Page

from tide_trainer.report.html import main_report, write_report
from tide_trainer.report.metrics import MetricsFailed

Make = Callable[..., Path]


def parsed(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_a_whole_run(make_run: Make, records: list[Any], samples: list[Any]) -> None:
    path = write_report(make_run(records, samples))
    page = parsed(path)
    assert path.name == "report.html"
    assert "The agent got better: sampled success on 200 held-out seeds rose from" in page.text
    assert "in 30 train steps, and the target of 90% was reached." in page.text
    assert sum(tag == "svg" for tag, _ in page.seen) == 2 + 13
    assert "480 trained + 43 dropped = 523 prompts (dropped: all rewards equal 41, environment_lost 2)" in page.text
    assert "Seed 1000" in page.text
    assert "Seed 1001" in page.text
    assert "BabyAI-GoToObj-v0" in page.text
    assert re.search(r"CPU of a turn: scheduler 0\.\d\d \+ router 0\.\d\d \+ gateway 0\.\d\d = [\d.]+ ms", page.text)
    assert "Mean of 30k turns" in page.text


def test_the_page_needs_nothing_from_elsewhere(make_run: Make, records: list[Any], samples: list[Any]) -> None:
    page = parsed(write_report(make_run(records, samples)))
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"link", "img", "iframe", "object", "embed", "form"}
    assert [attributes for tag, attributes in page.seen if tag == "script"] == [{}]
    assert not any("src" in attributes or "href" in attributes for _, attributes in page.seen)


def test_nothing_from_the_run_becomes_markup(make_run: Make, records: list[Any], samples: list[Any]) -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">{{ 7 * 7 }}\'"'
    for record in records:
        for key in ("name", "reason", "started_at", "status", "phase"):
            if key in record:
                record[key] = evil
        if "config" in record:
            record["config"][evil] = {evil: evil}
            record["config"]["tasks"]["environment"] = evil
        for key in ("cpu_s", "peak_rss_bytes", "account"):
            if key in record:
                record[key] = {**record[key], f"dropped: {evil}": 1.0}
    for sample in samples:
        sample.update(uid=evil, seed=evil, outcome=evil, when=evil)
        sample["messages"] += [
            {"role": evil, "content": evil},
            {"role": "user", "content": [{"type": "text", "text": evil}, {"type": evil}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": evil, "arguments": evil}}]},
        ]
        sample["tokens"][-1]["text"] = evil
    path = write_report(make_run(records, samples))
    page = parsed(path)
    assert sum(tag == "script" for tag, _ in page.seen) == 1
    assert not any(tag == "img" for tag, _ in page.seen)
    assert not any(key.startswith("on") for _, attributes in page.seen for key in attributes)
    assert page.text.count(evil) >= 10
    assert "49" not in re.sub(r"\d{3,}", "", page.text.split("Trajectories")[1].split("Configuration")[0])


def test_the_policy_allows_the_pages_own_script_only(make_run: Make, records: list[Any]) -> None:
    import base64
    import hashlib

    text = write_report(make_run(records)).read_text(encoding="utf-8")
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert f"script-src 'sha256-{digest}'" in policy.replace("&#43;", "+").replace("&#39;", "'")
    assert "default-src 'none'" in policy


def test_an_empty_run_still_gets_a_page(make_run: Make) -> None:
    page = parsed(write_report(make_run([])))
    assert "The run has no recorded end" in page.text
    assert "quickstart" in page.text
    assert "No evaluation and no train step was recorded." in page.text


def test_a_failed_run_with_a_torn_line_still_gets_a_page(make_run: Make, records: list[Any]) -> None:
    folder = make_run([*records[:20], {"event": "end", "time_s": 9, "status": "failed", "reason": "rank lost"}])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('nonsense\n{"event":"train_st')
    page = parsed(write_report(folder))
    assert "The run failed after" in page.text
    assert "(rank lost)" in page.text
    assert "1 line of metrics.jsonl could not be read and is left out." in page.text


@pytest.mark.parametrize("missing", ["null", "absent", "text"])
def test_missing_fields_never_break_the_page(make_run: Make, records: list[Any], missing: str) -> None:
    kept = {"event", "time_s", "model_version"}
    thin: list[dict[str, Any]] = []
    for record in records:
        rest = {key: {"null": None, "text": "?"}.get(missing) for key in record if key not in kept}
        thin.append({key: record[key] for key in kept & set(record)} | ({} if missing == "absent" else rest))
    page = parsed(write_report(make_run(thin)))
    assert "Invariants" in page.text


def test_a_breach_is_loud(make_run: Make, records: list[Any]) -> None:
    records[-1]["largest_staleness"] = 5
    page = parsed(write_report(make_run(records)))
    assert "Invariant breached:" in page.text


def test_tokens_are_coloured_by_probability(make_run: Make, records: list[Any]) -> None:
    tokens = [
        {"text": "prompt", "logprob": None, "sampled": False, "version": -1},
        {"text": "sure", "logprob": -0.01, "sampled": True, "version": 3},
        {"text": "doubt", "logprob": -5.0, "sampled": True, "version": 3},
        {"text": "unknown", "logprob": None, "sampled": True, "version": 3},
    ]
    messages = [{"role": "user", "content": "prompt"}, {"role": "assistant", "content": "sure doubt unknown"}]
    sample = {"when": "after", "seed": 1, "reward": 0.5, "messages": messages, "tokens": tokens}
    text = write_report(make_run(records, [sample])).read_text()
    assert '<span class="tok p0" title="log-prob -0.010, probability 99%, model version 3">sure</span>' in text
    assert '<span class="tok p4" title="log-prob -5.000, probability 0.674%, model version 3">doubt</span>' in text
    assert '<span class="tok plain" title="not sampled">prompt</span>' in text
    assert text.count(">sure</span>") == 2


@pytest.mark.parametrize(
    "content", ["not json", '{"a": 1}', "[" * 5000, '[1, null, {"messages": 3, "tokens": "x", "reward": "NaN"}]', "[]"]
)
def test_damaged_samples_are_told_and_the_rest_is_shown(make_run: Make, records: list[Any], content: str) -> None:
    folder = make_run(records)
    (folder / "samples.json").write_text(content)
    assert "Learning curve" in parsed(write_report(folder)).text


def test_a_second_report_replaces_the_first_and_leaves_no_other_file(make_run: Make, records: list[Any]) -> None:
    folder = make_run(records)
    first = write_report(folder).read_text()
    assert write_report(folder).read_text() == first
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html"]


def test_the_command(make_run: Make, records: list[Any], tmp_path: Path, capsys: Any) -> None:
    folder = make_run(records)
    assert main_report(folder) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert main_report(tmp_path / "nowhere") == 2
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(MetricsFailed):
        write_report(tmp_path / "nowhere")


def test_a_lone_surrogate_in_a_message_is_written_somehow(make_run: Make, records: list[Any]) -> None:
    folder = make_run(records)
    sample = {"when": "after", "seed": 1, "messages": [{"role": "user", "content": "\ud800 end"}]}
    (folder / "samples.json").write_text(json.dumps([sample]))
    assert "end" in parsed(write_report(folder)).text
