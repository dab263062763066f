"""The plot of `bench_ctb`: speed and hit rate of each policy in the main cell, a dot for each seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ctb_figures import RunFigures
from ctb_plan import CTB, MAIN, SEEDS
from ctb_report import strongest_fixed

from tide_trainer.report.elements import element, joined, svg

_WIDTH, _ROW, _TOP, _LABEL, _PANEL, _GAP = 760.0, 30.0, 48.0, 96.0, 300.0, 36.0
_OURS, _OTHERS, _LINE = "#1f5fbf", "#9aa3b2", "#c9ced6"


def plot(runs: Sequence[RunFigures]) -> str:
    """An SVG: on the left tasks per minute over those of the strongest fixed concurrency, on the right the hit rate."""
    main = [run for run in runs if run.cell == MAIN]
    compared = [run for run in main if run.seed in SEEDS] or main
    best = strongest_fixed(main)
    base = {run.seed: run.tasks_per_minute for run in compared if run.policy == best}
    names = list(dict.fromkeys(run.policy for run in compared))
    height = _TOP + _ROW * len(names) + 34
    speeds = {
        name: [run.tasks_per_minute / base[run.seed] for run in compared if run.policy == name and run.seed in base]
        for name in names
    }
    hits = {name: [run.hit_rate for run in compared if run.policy == name] for name in names}
    ideal = statistics.median(run.ideal_hit_rate for run in compared) if compared else None
    top = max((value for values in speeds.values() for value in values), default=1.0)
    body = [
        element("rect", width=_WIDTH, height=height, fill="#ffffff"),
        *(
            element("text", name, x=_LABEL - 8, y=_TOP + _ROW * (row + 0.5) + 4, text_anchor="end")
            for row, name in enumerate(names)
        ),
        *_panel(f"tasks per minute / {best}", _LABEL, speeds, max(1.2, top * 1.05), 1.0),
        *_panel("prefix hit rate (line: a perfect cache)", _LABEL + _PANEL + _GAP, hits, 1.0, ideal),
    ]
    style = {"font_family": "sans-serif", "font_size": "12", "fill": "#333"}
    inner = element("g", joined(body), **style)
    drawn = svg(_WIDTH, height, "Speed and prefix hit rate of each policy on vLLM", inner)
    return str(drawn).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + "\n"


def _panel(title: str, left: float, values: dict[str, list[float]], top: float, line: float | None) -> list[str]:
    bottom = _TOP + _ROW * len(values)
    drawn: list[str] = [element("text", title, x=left, y=_TOP - 18, font_weight="bold")]
    for row, (name, some) in enumerate(values.items()):
        if not some:
            continue
        y, colour = _TOP + _ROW * row, _OURS if name == CTB else _OTHERS
        middle = statistics.median(some)
        drawn.append(element("rect", x=left, y=y + 6, width=middle / top * _PANEL, height=_ROW - 12, fill=colour))
        drawn += [element("circle", cx=left + one / top * _PANEL, cy=y + _ROW / 2, r=3, fill="#333") for one in some]
        drawn.append(element("text", f"{middle:.2f}", x=left + 4, y=y + _ROW / 2 + 4, fill="#ffffff"))
    if line is not None:
        x = left + line / top * _PANEL
        drawn.append(element("path", d=f"M{x:g} {_TOP:g}V{bottom:g}", stroke="#333", stroke_dasharray="5 4"))
    drawn.append(element("path", d=f"M{left:g} {bottom:g}H{left + _PANEL:g}", stroke=_LINE))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + share / top * _PANEL
        drawn.append(element("text", f"{share:g}", x=x, y=bottom + 16, text_anchor="middle"))
    return drawn
