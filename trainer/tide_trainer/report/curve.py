"""The learning curve: success on held-out seeds over model versions, the warm start at its left. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from tide_trainer.report.axes import Frame
from tide_trainer.report.charts import MAX_MARKERS, Figure, Series, hover, line, reference_line, thinned
from tide_trainer.report.elements import element, joined, svg
from tide_trainer.report.formats import number, percent
from tide_trainer.report.summary import Evaluation, RunSummary

WIDE = (1000.0, 360.0)
NARROW = (372.0, 300.0)
LEFT = 46.0
LABEL_GAP = 14.0


def learning_curve(run: RunSummary) -> Figure:
    """The chart of the report: sampled success with its 95% band, greedy beside it, training batches faintly."""
    title = "Success on held-out seeds"
    series = _series(run)
    warm = _warm_series(run)
    if not any(one.values for one in (*series, *warm)):
        return Figure(title, "", [], Markup())
    notes = []
    if any(point.low is not None for point in run.sampled):
        notes.append("The band is the 95% binomial (Wilson) interval of the sampled success.")
    if any(point.partial for point in (*run.sampled, *run.greedy)):
        notes.append("Hollow points: evaluations that were cut short.")
    if any(one.values for one in warm):
        notes.append("Left of the line: the supervised warm start.")
    return Figure(
        title,
        "",
        [one for one in series if one.values] or [one for one in warm if one.values],
        _draw(run, series, warm, WIDE),
        _draw(run, series, warm, NARROW),
        " ".join(notes),
    )


def _series(run: RunSummary) -> list[Series]:
    batch = [(float(step["model_version"]) - 1, number(step, "success")) for step in run.steps]
    return [
        Series("sampled (temperature 1)", [(p.model_version, p.success) for p in run.sampled], 1, markers=True),
        Series("greedy", [(p.model_version, p.success) for p in run.greedy], 2, "dashed", markers=True),
        thinned(Series("training batch", batch, 3, "faint")),
    ]


def _warm_series(run: RunSummary) -> list[Series]:
    points = run.warm_start
    sampled = [(p.supervised_step, p.sampled) for p in points if p.sampled is not None]
    greedy = [(p.supervised_step, p.greedy) for p in points if p.greedy is not None]
    return [
        Series("sampled (temperature 1)", sampled, 1, markers=True),
        Series("greedy", greedy, 2, "dashed", markers=True),
    ]


def _draw(run: RunSummary, series: Sequence[Series], warm: Sequence[Series], size: tuple[float, float]) -> Markup:
    width, height = size
    has_warm, has_main = any(one.values for one in warm), any(one.values for one in series)
    right, bottom = width - 44, height - 44
    split = LEFT + (right - LEFT) * (0.2 if width > 500 else 0.26) if has_warm and has_main else LEFT
    body: list[Markup] = []
    if has_warm:
        end = split - 16 if has_main else right
        frame = Frame(LEFT, 24, end, bottom, _domain(warm), (0.0, 1.0))
        body += [frame.y_axis(percent), frame.x_axis("supervised train step" if end - LEFT > 130 else "supervised")]
        body += [line(frame, one) for one in warm]
        body.append(hover(frame, _xs(warm), warm, "supervised train step", percent))
        if has_main:
            body.append(_mark(LEFT, 14, "warm start"))
            body.append(element("line", class_="divider", x1=split - 6, x2=split - 6, y1=6, y2=bottom + 4))
    if has_main:
        frame = Frame(split + (6 if has_warm else 0), 24, right, bottom, _domain(series), (0.0, 1.0))
        body += [frame.y_axis(percent, labels=not has_warm), frame.x_axis("model version (train steps done)")]
        if has_warm:
            body.append(_mark(frame.left, 14, "reinforcement learning"))
        body.append(_band(frame, run.sampled))
        if run.target is not None:
            body.append(reference_line(frame, run.target, f"target {percent(run.target)}"))
        body += [line(frame, one) for one in reversed(series)]
        body += [_hollow(frame, run.sampled, 1), _hollow(frame, run.greedy, 2), _end_labels(frame, series[:2])]
        body.append(hover(frame, _xs(series), series, "model version", percent))
    return svg(width, height, _words(run), joined(body))


def _band(frame: Frame, points: Sequence[Evaluation]) -> Markup:
    known = [(frame.x(p.model_version), p.low, p.high) for p in points if p.low is not None and p.high is not None]
    upper = [f"{x:g},{frame.y(high):g}" for x, _, high in known]
    lower = [f"{x:g},{frame.y(low):g}" for x, low, _ in reversed(known)]
    parts = [
        element("line", class_="t1 whisker", x1=x, x2=x, y1=frame.y(low), y2=frame.y(high))
        for x, low, high in known
        if len(known) <= MAX_MARKERS
    ]
    if len(known) > 1:
        parts.append(element("polygon", class_="t1 band", points=" ".join(upper + lower)))
    return joined(parts)


def _hollow(frame: Frame, points: Sequence[Evaluation], tone: int) -> Markup:
    return joined(
        element("circle", class_=f"t{tone} hollow", cx=frame.x(p.model_version), cy=frame.y(p.success), r=3.4)
        for p in points
        if p.partial
    )


def _end_labels(frame: Frame, series: Sequence[Series]) -> Markup:
    """The last values beside their points, moved apart where they would touch."""
    ends = [(one.points[-1], one.tone) for one in series if one.values]
    placed: list[tuple[float, float, str, int]] = []
    for (x, value), tone in sorted(ends, key=lambda end: -(end[0][1] or 0.0)):
        y = frame.y(value or 0.0) + 4
        if placed and y - placed[-1][1] < LABEL_GAP:
            y = placed[-1][1] + LABEL_GAP
        placed.append((frame.x(x) + 9, y, percent(value), tone))
    return joined(element("text", text, class_=f"t{tone} value", x=x, y=y) for x, y, text, tone in placed)


def _mark(x: float, y: float, text: str) -> Markup:
    return element("text", text, class_="mark", x=x, y=y)


def _xs(series: Sequence[Series]) -> list[float]:
    return sorted({x for one in series for x, y in one.points if y is not None})


def _domain(series: Sequence[Series]) -> tuple[float, float]:
    xs = _xs(series)
    return (xs[0], xs[-1]) if xs[-1] > xs[0] else (xs[0], xs[0] + 1)


def _words(run: RunSummary) -> str:
    values = ", ".join(f"version {p.model_version:.0f} {percent(p.success)}" for p in run.sampled)
    return f"Success on held-out seeds. Sampled: {values or 'not evaluated'}"
