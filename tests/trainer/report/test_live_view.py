from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tide_trainer.report import view as view_module
from tide_trainer.report.panel import panel, sparkline
from tide_trainer.report.view import LiveView
from tide_trainer.report.view_state import ViewState

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
PROGRESS = {
    "event": "progress",
    "buffers": [{"version": 12, "state": "filling", "occupied": 10, "reserved": 6, "size": 16}],
    "ranks": [
        {"rank": "local:1", "role": "rollout", "version": 12, "usage_tokens": 41_200, "budget_tokens": 65_536,
         "measured_tokens": 30_100, "num_active": 92, "num_paused": 8}
    ],
    "num_queued": 20, "num_active": 92, "num_paused": 8,
}  # fmt: skip


def console(*, terminal: bool, width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=40, legacy_windows=False)


def output(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def drawn(state: ViewState, width: int = 120, *, unicode: bool = True) -> str:
    target = console(terminal=False, width=width)
    target.print(panel(state, 65.0, width=width, unicode=unicode))
    return output(target)


def view(target: Console, clock: Any) -> LiveView:
    return LiveView(target, name="quickstart", max_train_steps=30, eta=1, target=0.9, clock=clock)


def test_without_a_terminal_there_are_plain_lines_without_control_codes(records: list[Any], clock: Any) -> None:
    target = console(terminal=False)
    with view(target, clock) as shown:
        for record in records:
            shown.update(record)
        shown.update(PROGRESS)
    lines = output(target).splitlines()
    assert "\x1b" not in output(target)
    assert lines[0].endswith("phase: booting")
    assert sum(": success=" in line and "train step " in line for line in lines) == 30
    assert sum("evaluation, sampled" in line for line in lines) == 7
    assert lines[-1].endswith("end: completed (max_train_steps)")
    assert len(lines) == 5 + 8 + 30 + 9 + 1


def test_control_codes_in_a_record_do_not_reach_the_terminal(clock: Any) -> None:
    target = console(terminal=False)
    with view(target, clock) as shown:
        shown.update({"event": "phase", "phase": "\x1b[2Jboom\n[bold]x[/bold]"})
    assert output(target).strip().endswith("phase:  [2Jboom [bold]x[/bold]")


def test_the_panel_tells_all(records: list[Any]) -> None:
    state = ViewState("quickstart", 30, eta=1, target=0.9)
    for record in records[:34]:
        state.fold(record)
    state.fold(PROGRESS)
    text = drawn(state)
    for words in ("training", "16/30", "left", "sampled", "greedy", "batch", "target 90%", "staleness", "(bound 1)",
                  "tok/s", "hit rate", "rollout 0.", "10/16 groups, 6 reserved", "41.2k/65.5k tok",
                  "92 active, 8 paused", "20 queued", "1:05"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_panel_keeps_within_the_terminal(records: list[Any], width: int) -> None:
    state = ViewState("[red]odd[/red] name", 30, eta=1)
    for record in [*records[:40], PROGRESS]:
        state.fold(record)
    lines = drawn(state, width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert drawn(state, width, unicode=False)


def test_strange_records_are_drawn_somehow() -> None:
    state = ViewState("q", 0)
    for event in ("phase", "train_step", "evaluation", "warm_start", "progress", "end", "unheard", None):
        state.fold({"event": event, "buffers": 3, "ranks": [None, {}], "success": "high", "model_version": []})
    assert "train step" in drawn(state)


def test_sparklines_span_their_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, 2.0]) == "▁▅██"
    assert sparkline([-1.0, 1.0], unicode=False) == "_#"


def test_time_left_comes_from_the_median_train_step() -> None:
    state = ViewState("q", 10)
    state.fold({"event": "phase", "phase": "training", "time_s": 100.0})
    assert state.time_left_s(100.0) is None
    for version, time_s in ((1, 104.0), (2, 108.0), (3, 130.0)):
        state.fold({"event": "train_step", "model_version": version, "time_s": time_s})
    assert state.time_left_s(130.0) == pytest.approx(7 * 4.0)
    assert state.time_left_s(132.0) == pytest.approx(7 * 4.0 - 2.0)
    assert state.time_left_s(1000.0) == 0.0
    state.fold({"event": "end", "status": "completed"})
    assert state.time_left_s(140.0) is None


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_restored(records: list[Any], clock: Any, error: type[BaseException] | None) -> None:
    target = console(terminal=True)

    def run() -> None:
        with view(target, clock) as shown:
            shown.update(records[0])
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert output(target).count(HIDE_CURSOR) == output(target).count(SHOW_CURSOR) == 1


def test_the_panel_stays_on_the_screen_after_the_end(records: list[Any], clock: Any) -> None:
    target = console(terminal=True)
    with view(target, clock) as shown:
        for record in records:
            shown.update(record)
    assert "completed" in output(target)
    assert "30/30" in output(target)


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_a_drawing_error_never_reaches_the_run(
    num_good: int, records: list[Any], clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_drawn = 0

    def broken(*_: object, **__: object) -> str:
        nonlocal num_drawn
        num_drawn += 1
        if num_drawn > num_good:
            raise ZeroDivisionError("bad bar")
        return "good"

    monkeypatch.setattr(view_module, "panel", broken)
    target = console(terminal=True)
    with view(target, clock) as shown:
        while num_drawn <= num_good:
            shown._live.refresh()  # type: ignore[union-attr]
        for record in records:
            shown.update(record)
    assert [record.message for record in caplog.records] == [
        "live view: drawing failed (ZeroDivisionError: bad bar); plain lines follow; the run goes on"
    ]
    assert "end: completed" in output(target)
    assert output(target).count(HIDE_CURSOR) == output(target).count(SHOW_CURSOR)


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("terminal", [True, False])
def test_a_closed_pipe_never_reaches_the_run(
    records: list[Any], clock: Any, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "on_broken_pipe", _exit)
    target = Console(file=ClosedPipe(), force_terminal=terminal, width=80)
    with view(target, clock) as shown:
        for record in records:
            shown.update(record)


def _exit(_: Console) -> None:
    """As rich's own, which also points the process's standard output to nowhere."""
    raise SystemExit(1)


def test_an_encoding_that_lacks_a_letter_is_no_failure(clock: Any) -> None:
    raw = io.BytesIO()
    target = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=80)
    with view(target, clock) as shown:
        shown.update({"event": "end", "status": "failed", "reason": "Größe"})
        shown.update({"event": "phase", "phase": "stopping"})
    assert raw.getvalue().decode().splitlines()[1].endswith("phase: stopping")


def alarm(kind: str, state: str = "raised") -> dict[str, Any]:
    return {"event": "alarm", "state": state, "rank": "local:1", "kind": kind, "message": "[red]40 tokens[/red]"}


def test_alarms_and_missing_capacity_data_are_shown_until_they_are_over() -> None:
    state = ViewState("q", 3)
    state.fold(PROGRESS)
    assert "engine 30.1" in drawn(state)
    assert "alarm" not in drawn(state)
    for kind in ("above", "missing", "evicted", "unreported"):
        state.fold(alarm(kind))
    state.fold({"event": "readiness", "ready": False})
    shown = drawn(state)
    assert "above at local:1: [red]40 tokens[/red]" in shown
    assert "and 1 more alarms" in shown
    assert "not ready" in shown
    for kind in ("above", "missing", "evicted", "unreported"):
        state.fold(alarm(kind, "cleared"))
    state.fold({"event": "readiness", "ready": True})
    assert "alarm" not in drawn(state)
    assert "not ready" not in drawn(state)


def test_alarms_are_lines_of_a_plain_log(clock: Any) -> None:
    target = console(terminal=False)
    with view(target, clock) as shown:
        for record in (alarm("above"), alarm("above", "cleared"), {"event": "readiness", "ready": False}):
            shown.update({"time_s": 1.0, **record})
    text = output(target)
    assert "alarm raised, above at rank local:1: [red]40 tokens[/red]" in text
    assert "alarm cleared, above" in text
    assert "not ready: no rollout rank" in text
