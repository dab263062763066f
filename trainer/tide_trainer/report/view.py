"""The live view of a run: a panel on a terminal, plain lines elsewhere; it can fail without harm to the run."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

from tide_trainer.report.panel import panel
from tide_trainer.report.view_state import ViewState, plain_line, printable

REFRESHES_PER_S = 2

logger = logging.getLogger(__name__)


class LiveView:
    """Shows the run; a context manager that leaves the terminal as it found it, also after an exception or Ctrl-C.

    The panel is redrawn twice a second by rich's own thread, however often `update` is called; `update` only folds
    the record in. A drawing error ends the panel with one warning and the view goes on with plain lines.

    Args:
        console: where to draw; a terminal gets the panel, anything else one plain line per phase, warm start
            measurement, evaluation, train step and end.
        name: the run's name.
        max_train_steps: train steps planned.
        eta: staleness bound, None if unknown.
        target: success aimed at; None or 0 for none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        *,
        name: str,
        max_train_steps: int,
        eta: int | None = None,
        target: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._state = ViewState(name, max_train_steps, eta, target or None)
        self._clock = clock
        self._told_s = clock()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._broken: BaseException | None = None
        self._silent = False

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            try:
                self._guard(self._start)
            except BaseException:
                self._stop()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def update(self, record: Mapping[str, Any]) -> None:
        """Takes one record of the run, of any event; never raises because of drawing."""
        self._guard(lambda: self._fold(record))
        if self._broken is not None and self._live is not None:
            self._give_up(self._broken)
        if self._live is None:
            self._print(record)

    def _start(self) -> None:
        self._live = _GuardedLive(self._console, self._render, self._failed)
        self._live.start()

    def _fold(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._told_s = self._clock()
            self._state.fold(record)

    def _print(self, record: Mapping[str, Any]) -> None:
        def write() -> None:
            line = printable(plain_line(record, self._state.max_train_steps))
            if line:
                encoding = self._console.encoding
                text = f"{self._state.time_s:8.1f} s  {line}".encode(encoding, "replace").decode(encoding)
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)

        if not self._silent:
            self._silent = not self._guard(write, after="it is silent from here on")

    def _render(self) -> RenderableType:
        """Called by rich's thread, and once more when the panel ends."""
        with self._lock:
            now_s = self._state.time_s
            if not self._state.end:
                now_s += max(0.0, self._clock() - self._told_s)
            unicode = self._console.encoding.lower().startswith("utf")
            return panel(self._state, now_s, width=self._console.width, unicode=unicode)

    def _failed(self, error: BaseException) -> None:
        self._broken = error

    def _guard(self, act: Callable[[], object], after: str = "plain lines follow") -> bool:
        """Runs one piece of drawing; a failure is reported, ends the panel, and gives False."""
        try:
            act()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - drawing ends here; rich exits on a broken pipe
            self._give_up(error, after)
            return False
        return True

    def _give_up(self, error: BaseException, after: str = "plain lines follow") -> None:
        self._stop()
        logger.warning("live view: drawing failed (%s: %s); %s; the run goes on", type(error).__name__, error, after)

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.stop()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported; the cursor is the one thing left to put right
            logger.warning("live view: stopping failed (%s: %s)", type(error).__name__, error)
            with contextlib.suppress(Exception, SystemExit):  # the terminal is gone, which the line above says
                self._console.show_cursor(True)


class _GuardedLive(Live):
    """rich's Live whose refreshes report an error instead of raising it into rich's thread."""

    def __init__(
        self, console: Console, render: Callable[[], RenderableType], failed: Callable[[BaseException], None]
    ) -> None:
        super().__init__(
            console=console, get_renderable=render, refresh_per_second=REFRESHES_PER_S, vertical_overflow="crop"
        )
        self._failed = failed
        self._has_failed = False

    def refresh(self) -> None:
        """Redraws, unless a redraw has failed before."""
        if self._has_failed:
            return
        try:
            super().refresh()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - LiveView.update reports it
            self._has_failed = True
            self._failed(error)
