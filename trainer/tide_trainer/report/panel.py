"""The live view's panel, drawn from a ViewState with rich. Pure; text from the run is never read as markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tide_trainer.report.formats import MISSING, count, number, percent, quantity, seconds, stopwatch
from tide_trainer.report.view_state import ViewState, printable

SPARKS = "▁▂▃▄▅▆▇█"
MAX_ROWS = 8
MAX_ALARMS = 3
LABEL_WIDTH = 11
STATUS_STYLE = {"completed": "green", "failed": "bold red", "stopped": "yellow"}


def panel(state: ViewState, now_s: float, *, width: int, unicode: bool = True) -> RenderableType:
    """The whole panel.

    Args:
        state: what is known.
        now_s: seconds since the run's start.
        width: columns of the terminal.
        unicode: False draws with ASCII only.
    """
    draw = _Drawing(bar_width=max(8, min(30, width - 66)), unicode=unicode)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=LABEL_WIDTH, max_width=LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(overflow="ellipsis", no_wrap=True, max_width=max(8, width - LABEL_WIDTH - 6))
    for label, content in _rows(state, now_s, draw):
        grid.add_row(label, content)
    title = Text.assemble((f" {printable(state.name)} ", "bold"))
    clock = Text(f" {stopwatch(now_s)} ")
    style = STATUS_STYLE.get(state.phase, "cyan")
    return Panel(
        Group(grid), title=title, title_align="left", subtitle=clock, subtitle_align="right", border_style=style
    )


def sparkline(values: Sequence[float], *, unicode: bool = True) -> str:
    """Fractions from 0 to 1 as a row of small bars."""
    marks = SPARKS if unicode else "_.-=+*%#"
    last = len(marks) - 1
    return "".join(marks[round(last * min(1.0, max(0.0, value)))] for value in values)


class _Drawing:
    def __init__(self, *, bar_width: int, unicode: bool) -> None:
        self.bar_width = bar_width
        self.unicode = unicode

    def bar(self, share: float, style: str, extra: float = 0.0) -> Text:
        """A bar filled to `share`, and on to `share + extra` with a lighter mark."""
        full, light, empty = ("█", "▒", "░") if self.unicode else ("#", "+", ".")
        filled = round(self.bar_width * min(1.0, max(0.0, share)))
        more = round(self.bar_width * min(1.0, max(0.0, share + extra))) - filled
        rest = self.bar_width - filled - more
        return Text.assemble((full * filled, style), (light * more, style), (empty * rest, "dim"))

    def sparks(self, values: Sequence[float]) -> str:
        return sparkline(values[-12:], unicode=self.unicode)


def _rows(state: ViewState, now_s: float, draw: _Drawing) -> Iterable[tuple[str, Text]]:
    yield "phase", _phase(state)
    if state.phase == "warm start" or (state.warm_start and not state.num_steps):
        yield "warm start", _warm_start(state.warm_start)
    yield "train step", _train_step(state, now_s, draw)
    yield "success", _success(state, draw)
    if state.step:
        yield "last step", _last_step(state)
        yield "waits", _waits(state.step)
    yield from _buffers(state.progress, draw)
    yield from _ranks(state.progress, draw)
    yield from _alarms(state)
    if state.progress:
        words = [f"{count(number(state.progress, f'num_{kind}'))} {kind}" for kind in ("active", "paused", "queued")]
        yield "tasks", Text(", ".join(words))


def _phase(state: ViewState) -> Text:
    text = Text(printable(state.phase), style=STATUS_STYLE.get(state.phase, "bold"))
    reason = state.end.get("reason")
    return text.append(f"  {printable(str(reason))}", style="dim") if reason else text


def _warm_start(record: Mapping[str, Any]) -> Text:
    words = f"supervised train step {count(number(record, 'supervised_step'))}, loss {quantity(number(record, 'loss'))}"
    for kind in ("sampled", "greedy"):
        success = number(record, f"{kind}_success")
        words += f", {kind} {percent(success)}" if success is not None else ""
    return Text(words)


def _train_step(state: ViewState, now_s: float, draw: _Drawing) -> Text:
    text = draw.bar(state.num_steps / max(1, state.max_train_steps), "cyan")
    text.append(f" {state.num_steps}/{state.max_train_steps}")
    left_s = state.time_left_s(now_s)
    return text.append(f"  about {stopwatch(left_s)} left", style="dim") if left_s is not None else text


def _success(state: ViewState, draw: _Drawing) -> Text:
    text = Text()
    for label, history in (("sampled", state.sampled), ("greedy", state.greedy)):
        value = percent(history[-1][1]) if history else MISSING
        text.append(f"{label} ").append(value, style="bold")
        text.append(
            f" {draw.sparks([success for _, success in history])}  " if len(history) > 1 else "  ", style="green"
        )
    batch = list(state.batch)
    text.append("batch ").append(percent(batch[-1]) if batch else MISSING, style="bold")
    text.append(f" {draw.sparks(batch)}" if len(batch) > 1 else "", style="green")
    return text.append(f"  target {percent(state.target)}", style="dim") if state.target else text


def _last_step(state: ViewState) -> Text:
    step, text = state.step, Text()
    largest = number(step, "staleness_max")
    mean = number(step, "staleness_mean")
    text.append(f"staleness {MISSING if mean is None else f'{mean:.2f}'}, largest {quantity(largest)}")
    if state.eta is not None:
        broken = largest is not None and largest > state.eta
        text.append(f" (bound {state.eta})", style="bold red" if broken else "dim")
    text.append(f"  goodput {quantity(number(step, 'goodput_tokens_per_s'))} tok/s")
    hit_rate = number(step, "hit_rate")
    return text.append(f"  hit rate {percent(hit_rate)}") if hit_rate is not None else text


def _waits(step: Mapping[str, Any]) -> Text:
    shown = (
        ("rollout", "rollout_wait_s"),
        ("training", "training_wait_s"),
        ("train step", "train_wall_s"),
        ("sync", "sync_wall_s"),
    )
    return Text(", ".join(f"{label} {seconds(number(step, key))}" for label, key in shown))


def _alarms(state: ViewState) -> Iterable[tuple[str, Text]]:
    if not state.ready:
        yield "not ready", Text("no rollout rank says what its KV cache holds", style="bold red")
    for (rank, kind), message in list(state.alarms.items())[:MAX_ALARMS]:
        yield "alarm", Text(printable(f"{kind} at {rank}: {message}"), style="bold red")
    if len(state.alarms) > MAX_ALARMS:
        yield "", Text(f"and {len(state.alarms) - MAX_ALARMS} more alarms", style="red")


def _buffers(progress: Mapping[str, Any], draw: _Drawing) -> Iterable[tuple[str, Text]]:
    for buffer in _records(progress, "buffers"):
        size = number(buffer, "size") or 0.0
        occupied, reserved = number(buffer, "occupied") or 0.0, number(buffer, "reserved") or 0.0
        text = draw.bar(occupied / size if size else 0.0, "green", reserved / size if size else 0.0)
        text.append(f" {occupied:.0f}/{size:.0f} groups")
        text.append(f", {reserved:.0f} reserved" if reserved else "", style="dim")
        state = buffer.get("state")
        yield (
            f"buffer v{count(number(buffer, 'version'))}",
            text.append(f"  {printable(str(state))}" if state else "", "dim"),
        )


def _ranks(progress: Mapping[str, Any], draw: _Drawing) -> Iterable[tuple[str, Text]]:
    ranks = _records(progress, "ranks")
    for rank in ranks[:MAX_ROWS]:
        usage, budget = number(rank, "usage_tokens"), number(rank, "budget_tokens")
        text = draw.bar((usage or 0.0) / budget if budget else 0.0, "blue")
        text.append(f" {quantity(usage)}/{quantity(budget)} tok")
        measured = number(rank, "measured_tokens")
        text.append(f", engine {quantity(measured)}" if measured is not None else "", style="dim")
        text.append(f"  {count(number(rank, 'num_active'))} active, {count(number(rank, 'num_paused'))} paused")
        version = number(rank, "version")
        text.append(f"  {printable(str(rank.get('role') or ''))}", style="dim")
        text.append(f" v{version:.0f}" if version is not None else "", style="dim")
        yield printable(str(rank.get("rank") or "rank")), text
    if len(ranks) > MAX_ROWS:
        yield "", Text(f"and {len(ranks) - MAX_ROWS} more ranks", style="dim")


def _records(progress: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = progress.get(key)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, Sequence) else []
