"""A person plays one task, from `/start` to `/end`.

Reading is plain and blocking, in the main thread, so that Ctrl-C and the end of the input come where they are typed;
the event loop runs only while the gateway is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TextIO

from tide_sdk.client import GatewayClient
from tide_sdk.errors import TideError
from tide_sdk.http_connection import TransportError
from tide_sdk.play.shown import Shown, safe
from tide_sdk.play.typed import HELP, QUOTES, Command, Typo, read_line, tool_call, whole_message, words
from tide_sdk.wire import EndResponse, ObservationResponse, StartResponse

PROMPT = "you> "
END_LIMIT_S = 30.0
LOOK_S = 0.25
"""Seconds after which a signal is seen at the latest while a line is awaited."""
_OVER = frozenset({"expired", "ended", "environment_failed", "environment_lost", "turn_expired", "stale_attempt"})
"""Errors after which the task takes no turn any more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is played.

    Attributes:
        environment: its name at the gateway.
        task: parameters for the environment.
        seed: the episode's seed.
        split: the data split.
        kind: train or eval.
    """

    environment: str
    task: Mapping[str, Any]
    seed: int | None = None
    split: str | None = None
    kind: Literal["train", "eval"] = "eval"


class Keyboard:
    """Lines from a person or from a pipe.

    Args:
        stream: where they come from.
        out: where the prompt, and a pipe's lines themselves, are shown.
    """

    def __init__(self, stream: TextIO, out: TextIO) -> None:
        self._stream, self._out = stream, out
        self._terminal = stream.isatty() and stream is sys.stdin
        if self._terminal:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # editing and history in `input`, where the system has it

    def line(self, prompt: str) -> str:
        """The next line without its end.

        Raises:
            EOFError: there is none any more.
        """
        with _woken():
            if self._terminal:
                return input(prompt)
            line = self._stream.readline()
        if not line:
            raise EOFError
        self._out.write(f"{prompt}{safe(line.rstrip(chr(10)))}\n")
        return line.rstrip("\r\n")

    def typed(self) -> str:
        """The next message or command, of several lines where it stands between lines of three double quotes."""
        first = self.line(PROMPT)
        if first.strip() != QUOTES:
            return first
        lines = list[str]()
        while (line := self.line("...> ")).strip() != QUOTES:
            lines.append(line)
        text = "\n".join(lines)
        return f"/{text}" if text.startswith("/") else text  # between the quotes there are no commands


@contextlib.contextmanager
def _woken() -> Generator[None]:
    """Interrupts a read that waits, again and again, so that Python looks at its signals.

    A signal that comes between Python's last look and the system's read, or to another thread, is otherwise only seen
    with the next key.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGALRM, _nothing)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _nothing(number: int, frame: FrameType | None) -> None: ...


class PlaySession:
    """Plays one task.

    Args:
        gateway: where.
        runner: runs its calls.
        keyboard: what the person types.
        shown: makes what the person sees.
        say: prints it.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        runner: asyncio.Runner,
        keyboard: Keyboard,
        shown: Shown,
        say: Callable[[str], None],
    ) -> None:
        self._gateway, self._runner, self._keyboard, self._shown, self._say = gateway, runner, keyboard, shown, say
        self._started: StartResponse | None = None
        self._clocks: Mapping[Any, Any] = {}
        self._history: list[Mapping[str, Any]] = []
        self._turn = self._num_calls = self._epoch = 0
        self._reward = 0.0
        self._paused = self._over = False

    def play(self, wanted: Wanted) -> EndResponse | None:
        """Start the task, play until it is over or the person leaves, and end it; its account, None if there is none.

        Raises:
            TideError: it cannot be started.
            TransportError: nobody answers.
        """
        reason: str | None = "the person left"
        try:
            self._begin(wanted)
            while not self._over:
                self._take(self._keyboard.typed())
            reason = None
        except EOFError:
            self._say("")
        except KeyboardInterrupt:
            self._say("\ninterrupted")
        finally:
            account = self._end(reason)
        return account

    def _begin(self, wanted: Wanted) -> None:
        starting = self._gateway.start(
            wanted.environment,
            f"play-{secrets.token_hex(8)}",
            task=wanted.task,
            seed=wanted.seed,
            split=wanted.split,
            kind=wanted.kind,
        )
        started = self._started = self._runner.run(starting)
        self._turn, self._clocks = started.turn, started.clocks
        for message in started.messages:
            self._see(message.as_dict())
        if started.tools:
            self._say(
                f"{self._shown.own('tools, called with /tool NAME name=value')}\n{self._shown.tools(started.tools)}"
            )
        self._say(self._shown.own("/help lists what can be typed"))

    def _take(self, typed: str) -> None:
        if not typed.strip():
            return  # a key too many; an empty message stands between quotes
        try:
            read = read_line(typed)
            message = words(read) if isinstance(read, str) else self._command(read)
        except Typo as error:
            self._say(self._shown.own(safe(str(error))))
            return
        if message is None:
            return
        if self._paused:
            self._say(self._shown.own("the task is paused: /resume first"))
            return
        try:
            answer = self._runner.run(self._gateway.observe(self._task_id, self._turn, message))
        except (TideError, TransportError) as error:
            self._failed(error)
            return
        self._history.append(message)
        self._answered(answer)

    def _command(self, command: Command) -> dict[str, Any] | None:
        """Does what is no turn; the message of what is one."""
        assert self._started is not None
        match command.name:
            case "tool":
                self._num_calls += 1
                return tool_call(command.rest, self._started.tools, self._num_calls)
            case "json":
                return whole_message(command.rest)
            case "tools":
                self._say(self._shown.tools(self._started.tools) or self._shown.own("there are no tools"))
            case "history":
                for message in self._history:
                    self._say(self._shown.message(message))
            case "clocks":
                self._say(self._shown.clocks(self._clocks) or self._shown.own("there are no clocks"))
            case "pause" | "resume":
                self._control(command.name)
            case "end":
                raise EOFError
            case _:
                self._say(HELP)
        return None

    def _control(self, name: str) -> None:
        self._epoch += 1
        call = self._gateway.pause if name == "pause" else self._gateway.resume
        try:
            answer = self._runner.run(call(self._task_id, self._epoch))
        except (TideError, TransportError) as error:
            self._failed(error)
            return
        self._paused, self._epoch, self._clocks = str(answer.state) == "paused", answer.epoch, answer.clocks
        self._say(self._shown.own(f"{safe(str(answer.state))}; {self._shown.clocks(answer.clocks)}"))

    def _answered(self, answer: ObservationResponse) -> None:
        self._turn, self._clocks = answer.turn, answer.clocks
        for message in answer.messages:
            self._see(message.as_dict())
        told = list[str]()
        if answer.reward is not None:
            self._reward += answer.reward
            told.append(f"reward {answer.reward:g} (sum {self._reward:g})")
        if answer.info:
            told.append(f"info {self._shown.data(answer.info)}")
        if answer.terminated or answer.truncated:
            self._over = True
            told.append("the task is over" if answer.terminated else "the task was cut short")
        else:
            told.append(f"turn {answer.turn}")
            if "idle" in answer.clocks:
                told.append(self._shown.clocks({"idle": answer.clocks["idle"]}))  # pyright: ignore[reportArgumentType]
        self._say(self._shown.own("; ".join(told)))

    def _see(self, message: Mapping[str, Any]) -> None:
        self._history.append(message)
        self._say(self._shown.message(message))

    def _failed(self, error: Exception) -> None:
        self._over = isinstance(error, TideError) and error.code in _OVER
        self._say(self._shown.own(safe(str(error))))

    @property
    def _task_id(self) -> str:
        assert self._started is not None
        return self._started.task_id

    def _end(self, reason: str | None) -> EndResponse | None:
        """Ends the task whatever happened; a failure is told."""
        if self._started is None:
            return None
        try:
            account = self._runner.run(self._gateway.end(self._task_id, reason, deadline_s=END_LIMIT_S))
        except (TideError, TransportError, KeyboardInterrupt) as error:
            self._say(self._shown.own(safe(f"the task was not ended: {error}")))
            return None
        told = [f"{account.outcome.kind} after {account.turns} turns"]
        told.append("no reward" if account.reward is None else f"reward {account.reward:g}")
        if account.outcome.reason:
            told.append(account.outcome.reason)
        if account.metrics:
            told.append(f"metrics {self._shown.data(account.metrics)}")
        self._say(self._shown.own(safe("; ".join(told))))
        return account
