"""A trajectory's footprint turn by turn, and where its time went, as SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tide_trainer.report.axes import Frame, label_width, padded
from tide_trainer.report.charts import Figure, Series, hover, line, reference_line
from tide_trainer.report.elements import element, joined, svg
from tide_trainer.report.formats import count, seconds
from tide_trainer.report.recorded import RecordedTrajectory, RecordedTurn
from tide_trainer.report.replay import Pause, Replay

MAX_DRAWN = 400
WIDE, NARROW = (1120.0, 300.0), (372.0, 270.0)
FAR_ABOVE = 1.6
"""A budget this many times above all contexts is told in words: its line would flatten the bars."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A turn's context by where its tokens came from; `image` counts images that were not in the cache."""

    cached: int
    text: int
    image: int
    completion: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the time line: stretches (start, end, what a hover says), and their sum in seconds."""

    label: str
    tone: int
    stretches: Sequence[tuple[float, float, str]]

    @property
    def total_s(self) -> float:
        """Seconds in it."""
        return sum(end - start for start, end, _ in self.stretches)


def parts_of(record: RecordedTrajectory, replay: Replay) -> list[Parts]:
    """The parts of each recorded call's context, in order."""
    found: list[Parts] = []
    for item in sorted(
        (item for item in replay.items if item.turn), key=lambda item: item.turn.turn if item.turn else 0
    ):
        turn = item.turn
        assert turn is not None
        fresh = max(0, turn.prompt_tokens - turn.cached_tokens)
        image = min(fresh, turn.image_tokens)
        if item.span is not None:
            spans = record.segments[item.span.segment].images
            inside = (
                (max(s.start, turn.cached_tokens), min(s.start + s.num_tokens, turn.prompt_tokens)) for s in spans
            )
            image = min(fresh, sum(max(0, high - low) for low, high in inside)) if spans else image
        cached = min(turn.cached_tokens, turn.prompt_tokens)
        found.append(Parts(cached, fresh - image, image, turn.completion_tokens))
    return found


def footprint_chart(record: RecordedTrajectory, replay: Replay) -> Figure:
    """Context tokens of each call, one part on the other, with pauses, prediction and budget."""
    turns, parts = record.turns[:MAX_DRAWN], parts_of(record, replay)[:MAX_DRAWN]
    named = (("cached", 3), ("new prompt", 1), ("new images", 6), ("completion", 2))
    rows = [(one.cached, one.text, one.image, one.completion) for one in parts]
    series = [
        Series(label, [(float(turn.turn), row[index]) for turn, row in zip(turns, rows, strict=True)], tone)
        for index, (label, tone) in enumerate(named)
        if label != "new images" or any(row[2] for row in rows)
    ]
    expected = [(float(turn.turn), turn.predicted_tokens) for turn in turns if turn.predicted_tokens is not None]
    predicted = Series("expected at the end", expected, 8, "dashed")
    legend = [*series, predicted] if expected else series
    budget = max((turn.budget_tokens for turn in turns if turn.budget_tokens), default=None)
    top = max([sum(row) for row in rows] + [int(value) for _, value in expected], default=0)
    drawn_budget = budget if budget is not None and budget <= FAR_ABOVE * max(1, top) else None
    notes = [f"The rank's budget, {budget:,} tokens, lies above the chart."] if budget and not drawn_budget else []
    if len(record.turns) > MAX_DRAWN:
        notes.append(f"The first {MAX_DRAWN} of {len(record.turns):,} turns are drawn.")
    if any(_pause_at(turn, replay.pauses) for turn in turns):
        notes.append("Shaded: the task was paused before this call.")
    drawings = [_footprint(size, turns, series, predicted, drawn_budget, replay.pauses) for size in (WIDE, NARROW)]
    wide, narrow = drawings if turns else (Markup(), Markup())
    return Figure("Footprint", "tokens of each call's context", legend, wide, narrow, note=" ".join(notes))


def _footprint(
    size: tuple[float, float],
    turns: Sequence[RecordedTurn],
    series: Sequence[Series],
    predicted: Series,
    budget: int | None,
    pauses: Sequence[Pause],
) -> Markup:
    by_x = [dict(one.points) for one in series]
    totals = [sum(values[float(turn.turn)] or 0 for values in by_x) for turn in turns]
    domain = padded([*totals, *predicted.values, *([budget * 1.08] if budget else [])], zero=True)
    xs = [float(turn.turn) for turn in turns] or [0.0]
    frame = Frame(label_width(domain), 12, size[0] - 14, size[1] - 42, (xs[0] - 0.6, xs[-1] + 0.6), domain)
    step = frame.x(xs[0] + 1) - frame.x(xs[0])
    width = max(0.8, min(44.0, step * 0.72))
    body: list[Markup] = []
    for turn in turns:
        if _pause_at(turn, pauses):
            left, height = frame.x(turn.turn) - max(width, step) / 2, frame.bottom - frame.top
            band = min(max(width, step), 60.0)
            left = frame.x(turn.turn) - band / 2
            body.append(element("rect", class_="paused", x=left, y=frame.top, width=band, height=height))
    body += [frame.y_axis(), frame.x_axis("turn")]
    for turn in turns:
        base = 0.0
        for one, values in zip(series, by_x, strict=True):
            amount = values[float(turn.turn)] or 0
            y, bottom = frame.y(base + amount), frame.y(base)
            if bottom - y > 0.05:
                left = frame.x(turn.turn) - width / 2
                fill = f"t{one.tone} fill"
                body.append(element("rect", class_=fill, x=left, y=y, width=width, height=bottom - y))
            base += amount
    if predicted.values:
        body.append(line(frame, predicted))
    if budget:
        body.append(reference_line(frame, budget, f"budget {budget:,}"))
    waits = Series("paused (s)", [(float(turn.turn), _pause_at(turn, pauses) or None) for turn in turns], 8)
    body.append(hover(frame, xs, [*series, predicted, waits], "turn", lambda value: f"{value:,.6g}"))
    told = ", ".join(f"{one.label} {count(one.values[-1])}" for one in series if one.values)
    return svg(*size, f"Footprint of {len(turns)} calls; the last one: {told}", joined(body))


def _pause_at(turn: RecordedTurn, pauses: Sequence[Pause]) -> float:
    """Seconds of pause between a call's arrival and its end."""
    return sum(pause.end_s - pause.start_s for pause in pauses if turn.call_s <= pause.start_s <= turn.end_s)


def lanes(record: RecordedTrajectory, pauses: Sequence[Pause]) -> list[Lane]:
    """Where the time went: waiting to start, environment and agent, held without and with a pause, engine."""
    turns = record.turns[:MAX_DRAWN]
    begun = next((event.at_s for event in record.events if event.kind == "admitted"), 0.0)
    engine = [(turn.end_s - turn.engine_s, turn.end_s, f"turn {turn.turn}") for turn in turns]
    held = [(turn.call_s, turn.call_s + turn.held_s, f"turn {turn.turn}") for turn in turns]
    ends = [begun, *(turn.end_s for turn in turns)]
    starts = [turn.call_s for turn in turns]
    if len(turns) == len(record.turns):
        starts.append(max(record.duration_s, ends[-1]))
    between = [
        (max(0.0, end), start, f"before turn {number}" if number < len(turns) else "after the last turn")
        for number, (end, start) in enumerate(zip(ends, starts, strict=False))
        if start > end
    ]
    stopped = [(pause.start_s, pause.end_s, pause.reason) for pause in pauses[:MAX_DRAWN]]
    found = [
        Lane("waiting to start", 8, [(0.0, begun, "from the submission to the admission")] if begun else []),
        Lane("environment and agent", 3, between),
        Lane("held by the scheduler", 5, held),
        Lane("paused, of that", 4, stopped),
        Lane("engine", 1, engine),
    ]
    return [lane for lane in found if lane.stretches]


def time_line(record: RecordedTrajectory, pauses: Sequence[Pause]) -> Figure:
    """The lanes over the seconds since the submission."""
    rows = lanes(record, pauses)
    if not record.turns or not rows:
        return Figure("Time line", "", [], Markup())
    legend = [Series(f"{lane.label}: {seconds(lane.total_s)}", [], lane.tone) for lane in rows]
    note = f"The first {MAX_DRAWN} of {len(record.turns):,} turns are drawn." if len(record.turns) > MAX_DRAWN else ""
    wide, narrow = (_time_line(size[0], rows, pauses) for size in (WIDE, NARROW))
    return Figure("Time line", "seconds since the submission", legend, wide, narrow, note=note)


def _time_line(width: float, rows: Sequence[Lane], pauses: Sequence[Pause]) -> Markup:
    height = len(rows) * 22.0
    last = max(end for lane in rows for _, end, _ in lane.stretches)
    frame = Frame(14, 8, width - 14, 8 + height, (0.0, last or 1.0), (0.0, float(len(rows))))
    body: list[Markup] = []
    for pause in pauses[:MAX_DRAWN]:
        left = frame.x(pause.start_s)
        wide = max(0.8, frame.x(pause.end_s) - left)
        body.append(element("rect", class_="paused", x=left, y=frame.top, width=wide, height=height))
    body.append(frame.x_axis("s", whole=False))
    for index, lane in enumerate(rows):
        y = frame.top + index * 22.0 + 3
        for start, end, told in lane.stretches:
            left = frame.x(start)
            title = element("title", f"{lane.label}, {told}: {seconds(end - start)}")
            size = {"x": left, "y": y, "width": max(0.8, frame.x(end) - left), "height": 16.0}
            body.append(element("rect", title, class_=f"t{lane.tone} fill", **size))
    told = "; ".join(f"{lane.label} {seconds(lane.total_s)}" for lane in rows)
    return svg(width, 8 + height + 42, f"Time line: {told}", joined(body))
