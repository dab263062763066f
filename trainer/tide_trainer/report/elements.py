"""SVG elements. The one place where markup is made: names come from the code, everything else is escaped."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape


def element(name: str, *children: str, **attributes: str | float) -> Markup:
    """One element.

    Args:
        name: the tag.
        children: markup is taken as it is, other text is escaped.
        attributes: `class_` is class, `text_anchor` is text-anchor; numbers are written with at most two decimals.
    """
    written = [f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items()]
    inside = "".join(str(escape(child)) for child in children)
    return Markup(f"<{name}{''.join(written)}>{inside}</{name}>")  # noqa: S704 - every part is escaped above


def joined(parts: Iterable[Markup]) -> Markup:
    """Elements one after the other."""
    return Markup("").join(parts)


def svg(width: float, height: float, title: str, body: Markup) -> Markup:
    """The outermost element; `title` says to a screen reader what the chart shows."""
    return element("svg", body, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=title)


def _value(value: str | float) -> str:
    return str(escape(value)) if isinstance(value, str) else f"{round(value, 2):.12g}"
