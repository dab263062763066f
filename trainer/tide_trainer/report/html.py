"""report.html: one self-contained page about a run; works offline, in light and dark, and on paper."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tide_trainer.report.charts import TONES
from tide_trainer.report.curve import learning_curve
from tide_trainer.report.formats import moment, percent, quantity, seconds, size_of
from tide_trainer.report.metrics import MetricsFailed, read_metrics
from tide_trainer.report.pages import ReportFailed, page_file, script_hash, templates, write_page
from tide_trainer.report.replay_list import PageLink, write_pages
from tide_trainer.report.sections import charts
from tide_trainer.report.summary import RunSummary, summarise
from tide_trainer.report.trajectories import LEGEND, Pair, read_pairs
from tide_trainer.report.turn_cpu import SERVING, turn_cpu
from tide_trainer.report.verdict import breached, checks, key_figures, verdict

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.json"
REPORT_FILE = "report.html"


def write_report(run_dir: str | Path) -> Path:
    """Writes report.html from metrics.jsonl and samples.json, and a page of each recorded trajectory; returns its path.

    A run that failed, was stopped or still goes on gets a report of what there is. Idempotent; an earlier report is
    replaced in one move, so that a reader never sees half a page.

    Args:
        run_dir: the folder of a run.

    Raises:
        MetricsFailed: metrics.jsonl is not there or cannot be read.
        ReportFailed: the page cannot be written.
    """
    folder = Path(run_dir)
    run = summarise(read_metrics(folder / METRICS_FILE), name=folder.resolve().name)
    pairs, missing = read_pairs(folder / SAMPLES_FILE)
    shown = [sample.uid for pair in pairs for sample in (pair.before, pair.after) if sample is not None]
    pages, pages_note = write_pages(folder, shown)
    return write_page(folder / REPORT_FILE, _render(run, pairs, missing, pages, pages_note))


def _render(run: RunSummary, pairs: list[Pair], missing: str, pages: Mapping[str, PageLink], pages_note: str) -> str:
    """The page as text; everything that comes from the run is escaped."""
    script = page_file("report.js")
    template = templates().get_template("report.html.j2")
    return template.render(
        run=run,
        verdict=verdict(run),
        breached=breached(run),
        figures=key_figures(run),
        curve=learning_curve(run),
        charts=[figure for figure in charts(run) if figure.svg],
        checks=checks(run),
        parts=_parts(run),
        of_turn=turn_cpu(run.steps),
        serving=SERVING,
        config=_config(run.config),
        pairs=pairs,
        samples_note=missing,
        pages=pages,
        pages_note=pages_note,
        levels=LEGEND,
        moment=moment,
        percent=percent,
        quantity=quantity,
        seconds=seconds,
        style=page_file("report.css"),
        script=script,
        script_hash=script_hash(script),
    )


def main_report(run_dir: str | Path) -> int:
    """`tide-train report RUN_DIR`: writes the report, prints its path, returns the exit code (2: nothing to report)."""
    try:
        path = write_report(run_dir)
    except (MetricsFailed, ReportFailed) as error:
        print(f"tide-train report: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def _parts(run: RunSummary) -> list[dict[str, Any]]:
    """Rows of the table of parts: CPU, its share, and peak memory; the largest first."""
    total = sum(run.cpu_s.values()) or 1.0
    names = sorted({*run.cpu_s, *run.peak_rss_bytes}, key=lambda name: (-run.cpu_s.get(name, 0.0), name))
    return [
        {
            "name": name,
            "cpu": seconds(run.cpu_s.get(name)),
            "share": run.cpu_s.get(name, 0.0) / total,
            "memory": size_of(run.peak_rss_bytes.get(name)),
            "tone": min(index, TONES),
        }
        for index, name in enumerate(names, start=1)
    ]


def _config(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The configuration as sections of (dotted key, value)."""
    sections: list[tuple[str, list[tuple[str, str]]]] = []
    for name, section in config.items():
        rows: list[tuple[str, str]] = []
        _flatten("", section, rows, 0)
        sections.append((str(name), rows))
    return sections


def _flatten(prefix: str, value: Any, rows: list[tuple[str, str]], depth: int) -> None:
    if isinstance(value, Mapping) and value and depth < 8:
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, rows, depth + 1)
    else:
        rows.append((prefix or "value", json.dumps(value, ensure_ascii=False)[:2000]))
