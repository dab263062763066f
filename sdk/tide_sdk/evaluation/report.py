"""summary.json and report.html of an evaluation: one page that works offline, in light and dark, and on paper."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

from tide_sdk.evaluation import markup
from tide_sdk.evaluation.folder import RESULTS, EvaluationFailed, read_lines, read_manifest, write_whole
from tide_sdk.evaluation.markup import badge, figure, interval, number, outcome_badge, percent, table, tag, text
from tide_sdk.evaluation.records import Record
from tide_sdk.evaluation.summary import Summary, summarise

SUMMARY, REPORT = "summary.json", "report.html"
MAX_ROWS = 5_000
"""Tasks in the page's table; results.jsonl has them all."""
NUM_SAMPLES = 3
"""Conversations of each kind on the page: failed, succeeded, without a reward."""


def finish(folder: Path) -> Summary:
    """Write summary.json and report.html from what the folder holds, and give the summary; safe to repeat.

    Raises:
        EvaluationFailed: the folder holds no evaluation, or cannot be written.
    """
    manifest = read_manifest(folder)
    definition = cast("dict[str, Any]", manifest["definition"])
    try:
        threshold = float(definition["threshold"])
        samples = _Samples(threshold)
        records = list[Record]()
        if (folder / RESULTS).is_file():
            for record, _ in read_lines(folder / RESULTS):
                records.append(samples.seen(record))
        plan = cast("dict[str, Any]", definition["tasks"])
        summary = summarise(
            records, num_tasks=int(plan["num"]), repeats=int(definition["repeats"]), threshold=threshold
        )
        write_whole(folder / SUMMARY, json.dumps(summary.plain(), indent=1) + "\n")
        write_whole(folder / REPORT, render(manifest, summary, records, samples.chosen(), folder.resolve().name))
    except OSError as error:
        raise EvaluationFailed(f"{error.filename or folder}: {error.strerror}; free or fix the folder") from error
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationFailed(f"{folder}: the manifest lacks {error}; it is no evaluation of this release") from error
    return summary


def told(summary: Summary, folder: Path) -> str:
    """What an evaluation found in a few lines, the report's path last."""
    lines = [verdict(summary), f"{summary.overall.num} of {summary.overall.num_planned} plays have a reward"]
    for outcome, error, num in summary.reasons:
        lines.append(f"  {num} without: {outcome}: {''.join(c if c.isprintable() else '?' for c in error)}")
    return "\n".join([*lines, str(folder / REPORT)])


class _Samples:
    """Keeps the first conversations of each kind; all others are let go as they are read."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._kept: dict[str, list[Record]] = {"failed": [], "succeeded": [], "without a reward": []}

    def seen(self, record: Record) -> Record:
        """The record without its conversation."""
        if record.reward is None:
            kind = "without a reward"
        else:
            kind = "succeeded" if record.reward > self._threshold else "failed"
        if record.messages and len(self._kept[kind]) < NUM_SAMPLES:
            self._kept[kind].append(record)
        names = [name for name in Record.__dataclass_fields__ if name not in ("messages", "metrics")]
        return Record(**{name: getattr(record, name) for name in names})

    def chosen(self) -> list[tuple[str, Record]]:
        return [(kind, record) for kind, records in self._kept.items() for record in records]


def render(
    manifest: dict[str, Any],
    summary: Summary,
    records: Sequence[Record],
    samples: Sequence[tuple[str, Record]],
    name: str,
) -> str:
    """The page; everything that comes from the evaluation is escaped."""
    script = _page_file("report.js")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    )
    definition = cast("dict[str, Any]", manifest["definition"])
    body = [
        _top(definition, manifest, summary, name),
        _headline(summary),
        _groups(summary),
        _outcomes(summary),
        _charts(summary),
        _tasks(summary, records),
        _conversations(samples),
        _settings(definition),
    ]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        tag("title", text(f"{name} · evaluation")),
        f"<style>\n{_page_file('report.css')}</style>",
    ]
    footer = tag("footer", "Rewards are those of the plays that have one; no play without a reward counts as 0.")
    page = tag("main", *body, footer) + f"<script>{script}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head>\n<body>{page}</body></html>\n'


def _top(definition: dict[str, Any], manifest: dict[str, Any], summary: Summary, name: str) -> str:
    overall = summary.overall
    sessions = cast("list[dict[str, Any]]", manifest["sessions"])
    started = str(sessions[0].get("started_at", "")) if sessions else ""
    state = badge("complete", "good") if summary.complete else badge("incomplete", "bad")
    facts = [
        state,
        *(
            tag("span", text(f"{key} {definition[key]}"))
            for key in ("environment", "model", "agent")
            if definition.get(key)
        ),
    ]
    if started:
        facts.append(tag("span", text(f"started {started}")))
    parts = [
        tag("p", "TideRL evaluation", class_="kicker"),
        tag("h1", text(name)),
        tag("p", text(verdict(summary)), class_="verdict"),
        tag("p", *facts, class_="facts"),
    ]
    if not summary.complete and overall.success_bounds is not None:
        low, high = overall.success_bounds
        words = (
            f"{overall.num} of {overall.num_planned} plays have a reward. The share of successes over all of them lies "
            f"between {percent(low)} (if every other failed) and {percent(high)} (if every other succeeded)."
        )
        parts.append(tag("p", text(words), class_="alarm"))
    return tag("header", *parts)


def verdict(summary: Summary) -> str:
    """The evaluation in a sentence."""
    overall = summary.overall
    if overall.success is None:
        return f"No play has a reward, of {overall.num_planned} planned."
    share = overall.success
    plays = f"{share.num} plays of {share.num_tasks} tasks" if summary.repeats > 1 else f"{share.num} tasks"
    return f"{percent(share.value)} of {plays} succeeded ({interval(share)})."


def _headline(summary: Summary) -> str:
    overall = summary.overall
    cells = list[str]()
    if overall.success is not None:
        above = f"reward above {number(summary.threshold)}; {interval(overall.success)}"
        cells.append(figure("success", percent(overall.success.value), above))
    if overall.reward is not None:
        cells.append(figure("mean reward", number(overall.reward.value), interval(overall.reward, number)))
    for k in sorted({summary.repeats, min(2, summary.repeats)}) if summary.repeats > 1 else []:
        if (found := overall.pass_at.get(k)) is not None:
            cells.append(figure(f"pass@{k}", percent(found.value), f"{found.num_tasks} tasks; {interval(found)}"))
    cells.append(figure("plays with a reward", f"{overall.num} of {overall.num_planned}", f"{summary.num_tasks} tasks"))
    if overall.turns is not None:
        cells.append(figure("turns", number(overall.turns), f"mean; median {number(summary.median_turns or 0)}"))
    made = tag("section", *cells, class_="figures", aria_label="Headline figures")
    if summary.repeats < 2:
        return made
    rows = [
        [
            (f"pass@{k}", k),
            (percent(found.value), found.value),
            (interval(found), ""),
            (str(found.num_tasks), found.num_tasks),
        ]
        for k, found in overall.pass_at.items()
    ]
    head = [("k", False), ("pass@k", True), ("95% interval over tasks", False), ("tasks", True)]
    return made + tag("details", tag("summary", "pass@k for every k"), table(head, rows, sortable=False))


def _groups(summary: Summary) -> str:
    made = list[str]()
    for title, parts in (("By split", summary.splits), ("By group", summary.groups)):
        if not parts:
            continue
        head = [(title[3:], False), ("with a reward", True), ("success", True), ("mean reward", True)]
        head += [(f"pass@{summary.repeats}", True)] if summary.repeats > 1 else []
        rows = [markup.figures_row(name, found, summary.repeats) for name, found in parts.items()]
        made.append(tag("section", tag("h2", title), table([*head, ("turns", True)], rows, sortable=True)))
    return "".join(made)


def _outcomes(summary: Summary) -> str:
    total = max(1, summary.overall.num_planned or 1)
    rows = [
        [(text(outcome.replace("_", " ")), outcome), (str(num), num), (percent(num / total), num)]
        for outcome, num in summary.outcomes.items()
    ]
    made = table([("outcome", False), ("plays", True), ("share", True)], rows, sortable=False)
    if summary.reasons:
        lines = [[(text(o.replace("_", " ")), o), (text(error), error), (str(n), n)] for o, error, n in summary.reasons]
        head = [("without a reward", False), ("first line of the error", False), ("plays", True)]
        made += tag("h3", "Why plays have no reward") + table(head, lines, sortable=False)
    return tag("section", tag("h2", "Outcomes"), made)


def _charts(summary: Summary) -> str:
    drawn = markup.bars("Rewards", "plays by reward", summary.rewards) + markup.bars(
        "Turns", "plays by turns", summary.turns
    )
    return tag("section", tag("h2", "Spread"), tag("div", drawn, class_="grid")) if drawn else ""


def _tasks(summary: Summary, records: Sequence[Record]) -> str:
    tasks: dict[str, list[Record]] = {}
    for record in records:
        tasks.setdefault(record.id, []).append(record)
    grouped = any(record.group or record.split for record in records)
    rows = [_task_row(name, plays, summary, grouped) for name, plays in sorted(tasks.items(), key=_in_order)[:MAX_ROWS]]
    if not rows:
        return ""
    head = [("task", False), *([("group", False)] if grouped else []), ("success", True), ("mean reward", True)]
    head += [("turns", True), ("outcomes", False), ("error", False)]
    words = "" if len(tasks) <= MAX_ROWS else f"The first {MAX_ROWS:,} of {len(tasks):,}; results.jsonl has all."
    note = tag("p", words, class_="note") if words else ""
    return tag("section", tag("h2", "Tasks"), note, table(head, rows, sortable=True))


def _in_order(item: tuple[str, object]) -> tuple[bool, int, str]:
    """Numbers by their size, before all other names."""
    name = item[0]
    numeric = name.isascii() and name.isdecimal() and len(name) < 20
    return not numeric, int(name) if numeric else 0, name


def _task_row(name: str, plays: Sequence[Record], summary: Summary, grouped: bool) -> list[tuple[str, object]]:
    rewards = [record.reward for record in plays if record.reward is not None]
    hits = sum(reward > summary.threshold for reward in rewards)
    mean = sum(rewards) / len(rewards) if rewards else None
    turns = sum(record.turns for record in plays) / len(plays)
    kind = " ".join(word for word in (plays[0].split, plays[0].group) if word)
    error = next((record.error for record in plays if record.error), "")
    outcomes = Counter((record.outcome, record.reward is None) for record in plays)
    badges = " ".join(outcome_badge(outcome, lost, num) for (outcome, lost), num in outcomes.most_common())
    return [
        (text(name), name),
        *([(text(kind), kind)] if grouped else []),
        (f"{hits} of {len(rewards)}", hits / len(rewards) if rewards else -1),
        ("–" if mean is None else number(mean), "" if mean is None else mean),
        (number(turns), turns),
        (badges, plays[0].outcome),
        (text(error[:200]), error[:200]),
    ]


def _conversations(samples: Sequence[tuple[str, Record]]) -> str:
    made = list[str]()
    for kind, record in samples:
        reward = "no reward" if record.reward is None else f"reward {number(record.reward)}"
        title = f"{kind}: task {record.id}, play {record.repeat + 1}"
        marks = outcome_badge(record.outcome, record.reward is None) + badge(reward) + badge(f"{record.turns} turns")
        chat = tag("ol", *(markup.message(one) for one in record.messages), class_="chat")
        told = tag("p", text(record.error), class_="alarm") if record.error else ""
        made.append(tag("details", tag("summary", text(title), marks), told, chat, class_="pair"))
    return tag("section", tag("h2", "Conversations"), *made) if made else ""


def _settings(definition: dict[str, Any]) -> str:
    rows = [
        [(text(key), key), (tag("code", text(json.dumps(value, ensure_ascii=False)[:2000])), "")]
        for key, value in definition.items()
    ]
    made = table([("setting", False), ("value", False)], rows, sortable=False)
    return tag("section", tag("details", tag("summary", "What was evaluated, as the manifest has it"), made))


def _page_file(name: str) -> str:
    return (resources.files("tide_sdk.evaluation") / "page" / name).read_text(encoding="utf-8")
