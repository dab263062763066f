"""Pieces of a page: text in, HTML out, everything escaped; and a chart of bars."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, cast

from tide_sdk.evaluation.summary import Figures
from tide_sdk.statistics import Estimate

MAX_IMAGE_BYTES = 256 * 1024
"""A larger image of a conversation is named, not shown."""
MAX_TEXT_CHARS = 20_000
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_IMAGE = re.compile(r"data:(image/(?:png|jpeg|gif|webp));base64,([A-Za-z0-9+/=\s]+)")


def tag(name: str, *inner: str, **attributes: str) -> str:
    """An element; `inner` is HTML already, attributes are not. `class_` becomes `class`, `data_sort` `data-sort`."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value
    )
    return f"<{name}{given}>{''.join(inner)}</{name}>"


def text(value: object) -> str:
    """Words as HTML; control characters, which a page cannot hold, become U+FFFD."""
    return escape(_NO_TEXT.sub("\ufffd", str(value)))


def percent(value: float) -> str:
    """A share in percent, with a decimal."""
    return f"{100 * value:.1f}%"


def number(value: float) -> str:
    """A number with at most four significant digits."""
    return f"{value:.4g}"


def interval(estimate: Estimate, form: Any = percent) -> str:
    """The 95% interval of an estimate in words."""
    if estimate.low is None or estimate.high is None:
        return "no interval: one task, or all alike"
    return f"95% interval {form(estimate.low)} to {form(estimate.high)}"


def figure(label: str, value: str, remark: str) -> str:
    """A headline figure."""
    rows = (("label", label), ("number", value), ("remark", remark))
    return tag("div", *(tag("span", text(words), class_=name) for name, words in rows), class_="figure")


def badge(words: str, tone: str = "") -> str:
    """A small label."""
    return tag("span", text(words), class_=f"badge {tone}".strip())


def outcome_badge(outcome: str, lost: bool, num: int = 1) -> str:
    """The outcome in the colour of what it means, and how often it came; `lost`: without a reward."""
    tone = "bad" if lost else "good" if outcome == "completed" else "poor"
    times = f" × {num}" if num > 1 else ""
    return badge(f"{outcome.replace('_', ' ')}{times}", tone)


def table(head: Sequence[tuple[str, bool]], rows: Iterable[Sequence[tuple[str, object]]], *, sortable: bool) -> str:
    """A table.

    Args:
        head: (title, whether the column holds numbers).
        rows: of cells, each (HTML, what it is sorted by).
        sortable: its heads are buttons.
    """
    titles = [
        tag(
            "th",
            tag("button", text(title), type="button") if sortable else text(title),
            class_="n" if numeric else "",
            scope="col",
            aria_sort="none" if sortable else "",
        )
        for title, numeric in head
    ]
    body = "".join(
        tag(
            "tr",
            *(
                tag("td", inner, class_="n" if numeric else "", data_sort=str(key) if sortable else "")
                for (inner, key), (_, numeric) in zip(row, head, strict=True)
            ),
        )
        for row in rows
    )
    made = tag("table", tag("thead", tag("tr", *titles)), tag("tbody", body), class_="sortable" if sortable else "")
    return tag("div", made, class_="scroll")


def figures_row(name: str, found: Figures, repeats: int) -> list[tuple[str, object]]:
    """A row of the table of splits and groups."""
    cells: list[tuple[str, object]] = [(text(name), name), (f"{found.num} of {found.num_played}", found.num)]
    for estimate, form in ((found.success, percent), (found.reward, number), (found.pass_at.get(repeats), percent)):
        if estimate is None:
            cells.append(("–", ""))
            continue
        low_high = (
            "" if estimate.low is None or estimate.high is None else f"{form(estimate.low)} to {form(estimate.high)}"
        )
        cells.append((f"{form(estimate.value)} {tag('span', low_high, class_='soft')}", estimate.value))
    cells.append(("–" if found.turns is None else number(found.turns), found.turns or 0))
    return cells if repeats > 1 else [*cells[:4], cells[5]]


def bars(title: str, unit: str, bins: Sequence[tuple[float, float, int]]) -> str:
    """A histogram as inline SVG, each bar with its words for who points at it."""
    width, height, left, bottom = 380.0, 150.0, 34.0, 24.0
    top = max((count for _, _, count in bins), default=0)
    if not top:
        return ""
    step = min(60.0, (width - left) / len(bins))
    drawn = [f'<line class="axis" x1="{left}" y1="{height - bottom}" x2="{width}" y2="{height - bottom}"/>']
    drawn += [
        f'<text x="{left - 6}" y="14" text-anchor="end">{top}</text>'
        f'<text x="{left - 6}" y="{height - bottom}" text-anchor="end">0</text>'
    ]
    every = -(-len(bins) // 8)
    for index, (low, high, count) in enumerate(bins):
        tall = (height - bottom - 12) * count / top
        x, y = left + index * step + step * 0.08, height - bottom - tall
        words = f"{number(low)}: {count}" if low == high else f"{number(low)} to {number(high)}: {count}"
        drawn.append(
            f'<rect class="fill" x="{x:.1f}" y="{y:.1f}" width="{step * 0.84:.1f}" height="{tall:.1f}">'
            f"<title>{text(words)}</title></rect>"
        )
        if index % every == 0:
            middle = x + step * 0.42 if low == high else x
            drawn.append(f'<text x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{low:.3g}</text>')
    svg = tag("svg", *drawn, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=title)
    caption = tag("figcaption", tag("span", text(title), class_="title"), " ", tag("span", text(unit), class_="unit"))
    return tag("figure", caption, svg, class_="chart t1")


def message(found: Mapping[str, Any]) -> str:
    """A chat message: words, images, calls of tools."""
    role = str(found.get("role", "?"))
    side = "mine" if role == "assistant" else "theirs"
    content, parts = found.get("content"), list[str]()
    if isinstance(content, list):
        parts += [_part(part) for part in cast("list[Any]", content)]
    elif content:
        parts.append(_words(content))
    if found.get("reasoning_content"):
        parts.insert(0, tag("div", _words(found["reasoning_content"]), class_="reasoning"))
    calls: Any = found.get("tool_calls")
    for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
        function: Any = cast("dict[str, Any]", call).get("function") if isinstance(call, dict) else None
        named: dict[str, Any] = cast("dict[str, Any]", function) if isinstance(function, dict) else {"name": call}
        parts.append(tag("code", f"{text(named.get('name'))}({_words(named.get('arguments', ''))})", class_="call"))
    bubble = tag("div", *(parts or [tag("span", "(empty)", class_="soft")]), class_="bubble")
    return tag("li", tag("span", text(role), class_="role"), bubble, class_=f"turn {side}")


def _words(value: object) -> str:
    whole = value if isinstance(value, str) else str(value)
    cut = whole[:MAX_TEXT_CHARS]
    more = len(whole) - len(cut)
    return text(cut) + (tag("span", f" … {more:,} characters more", class_="soft") if more else "")


def _part(part: object) -> str:
    if not isinstance(part, dict):
        return _words(part)
    fields = cast("dict[str, Any]", part)
    if fields.get("type") == "text":
        return _words(fields.get("text", ""))
    if fields.get("type") == "image_url":
        inner: Any = fields.get("image_url")
        url = str(cast("dict[str, Any]", inner).get("url", "") if isinstance(inner, dict) else inner)
        return _image(url)
    return _words(fields)


def _image(url: str) -> str:
    found = _IMAGE.fullmatch(url)
    if found is None:
        return tag("span", f"[image: {text(url[:120])}]", class_="soft")
    size = len(found[2]) * 3 // 4
    if size > MAX_IMAGE_BYTES:
        return tag("span", f"[{text(found[1])} of {size:,} bytes, not shown]", class_="soft")
    try:
        base64.b64decode(found[2], validate=False)
    except ValueError:
        return tag("span", f"[{text(found[1])} that cannot be read]", class_="soft")
    return f'<img alt="image of the conversation" src="{escape(url)}">'
