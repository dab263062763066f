"""Drawings of bench_ctb_sim.py as SVG: bars of each policy in each cell, and curves of one setting after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COLOURS = ("#1f5fbf", "#8a3ea8", "#c9ced6", "#aab2be", "#8b95a5", "#6c7788", "#c2571a", "#10806b")
WIDTH, ROW, LEFT = 860, 14, 110
PANEL, GAP, TOP = (240, 150), 40, 30


def bars(cells: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Generated tokens per second (left) and hit rate (right) of each policy, cell by cell."""
    parts: list[str] = []
    y = 24
    half = (WIDTH - LEFT - 130) / 2
    parts.append(_text(LEFT, y, "generated tokens / s") + _text(LEFT + half + 70, y, "hit rate"))
    for where, cell in cells.items():
        y += 26
        parts.append(_text(8, y + ROW, where, bold=True))
        most = max(of["generated_tokens_per_s"] for of in cell.values())
        for index, (policy, of) in enumerate(cell.items()):
            y += ROW
            parts.append(_text(LEFT - 6, y, policy, anchor="end"))
            for x, share, told in (
                (LEFT, of["generated_tokens_per_s"] / most, f"{of['generated_tokens_per_s']:.0f}"),
                (LEFT + half + 70, of["hit_rate"], f"{of['hit_rate']:.3f}"),
            ):
                width, colour = round(half * share, 1), COLOURS[index % len(COLOURS)]
                parts.append(f'<rect x="{x}" y="{y - 10}" width="{width}" height="{ROW - 3}" fill="{colour}"/>')
                parts.append(_text(x + width + 5, y, told))
    return _svg(WIDTH, y + 20, parts, "Throughput and hit rate by policy and preset")


def curves(lines: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> str:
    """One panel a setting: throughput over the best fixed concurrency's, one line a preset."""
    parts: list[str] = []
    low = min(0.8, *(y for of in lines.values() for points in of.values() for _, y in points))
    high = max(1.05, *(y for of in lines.values() for points in of.values() for _, y in points))
    width, height = PANEL
    for number, (setting, presets) in enumerate(lines.items()):
        left, top = 50 + (number % 3) * (width + GAP), TOP + (number // 3) * (height + 60)
        parts.append(_text(left, top - 8, setting, bold=True))
        values = [point[0] for point in next(iter(presets.values()))]
        for level in (low, 1.0, high):
            y = round(top + height * (high - level) / (high - low), 1)
            parts.append(
                f'<path d="M{left} {y}h{width}" stroke="#c9ced6"/>' + _text(left - 5, y + 4, f"{level:.2f}", "end")
            )
        for index, (preset, points) in enumerate(presets.items()):
            colour = COLOURS[(0, 6, 7)[index % 3]]
            places = [
                (left + width * place / max(1, len(values) - 1), top + height * (high - y) / (high - low))
                for place, (_, y) in enumerate(points)
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<text x="{left + 20 * index}" y="{top + height + 34}" fill="{colour}">{preset}</text>')
        for place, value in enumerate(values):
            x = left + width * place / max(1, len(values) - 1)
            parts.append(_text(x, top + height + 16, f"{value:g}", "middle"))
    rows = -(-len(lines) // 3)
    return _svg(50 + 3 * (width + GAP), TOP + rows * (height + 60), parts, "Sensitivity of CTB to its settings")


def _text(x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{words}</text>'


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    box = f"0 0 {width:.0f} {height:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label="{title}"'
    ground = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    return f'{head} font-family="sans-serif" font-size="11" fill="#333">{ground}{"".join(parts)}</svg>\n'
