"""`tide-env play` as a command: from a pipe, in a terminal, with Ctrl-C, Ctrl-D and signals."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.timeout(120)


class Player:
    """Starts the command in a folder; `talking_environment:Talking` is played unless told otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *words: str, target: str = "talking_environment:Talking", **streams) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        argv = [sys.executable, "-m", "tide_sdk.cli", "play", target, *words]
        return subprocess.Popen(argv, cwd=self.folder, env=os.environ | {"PYTHONPATH": path}, text=True, **streams)

    def pipe(self, typed: str, *words: str, **more) -> tuple[int, str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.start(*words, **pipes, **more)
        out, _ = process.communicate(typed, timeout=60)
        return process.returncode, out


@pytest.fixture
def player(tmp_path):
    return Player(tmp_path)


def test_a_whole_task_is_played_from_a_pipe(player):
    typed = (
        '/tools\n/tool add n=4\n/tool add {"n": -1}\n/tool sub n=1\n\n"""\n/two\nlines\n"""\n/pause\nnot now\n/resume\n'
    )
    typed += "/history\n/nonsense\nstop\n"
    code, out = player.pipe(typed, "--seed", "7", "--task", '{"from": 10}')
    assert code == 0, out
    assert "seed 7 \\x1b]0;owned\\x07\\x1b[2J\\u202e" in out
    assert "\x1b" not in out
    assert "[image: images/image-1.png]" in out
    assert (player.folder / "images" / "image-1.png").read_bytes().startswith(b"\x89PNG")
    assert "  add(n?: integer)" in out
    assert out.index("sum 14") < out.index("sum 13")
    assert "reward 0.5 (sum 1); turn 2" in out
    assert "no tool 'sub'" in out
    assert "heard '/two\\nlines'" in out
    assert "the task is paused: /resume first" in out
    assert 'calls add({"n": 4})' in out, "the history shows what was done"
    assert "there is no /nonsense" in out
    assert "reward 1 (sum 3); the task is over" in out
    assert 'completed after 4 turns; reward 3; metrics {"sum": 13, "reason": null}' in out


def test_the_end_of_the_input_leaves_the_task_in_order(player):
    code, out = player.pipe("hello\n")
    assert code == 0, out
    assert '"reason": "the person left"' in out
    assert "after 1 turns" in out


def test_a_broken_environment_is_an_exit_code_and_its_words_are_safe(player):
    code, out = player.pipe("break\n")
    assert code == 1, out
    assert "environment_failed" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("words", "target", "told"),
    [
        ([], "talking", "--gateway says where it is"),
        ([], "talking_environment:Nothing", "is not a subclass"),
        ([], "http://127.0.0.1:9", "no gateway answers at"),
        (["--gateway", "http://127.0.0.1:9"], "talking", "no gateway answers at"),
        (["--gateway", "http://127.0.0.1:9"], "http://127.0.0.1:9", "give one place"),
        (["--set", "a=1"], "http://127.0.0.1:9", "--set is for a class"),
        (["--task", "{"], "talking_environment:Talking", "--task '{'"),
    ],
)
def test_a_wrong_call_says_what_to_give(player, words, target, told, monkeypatch, capsys):
    from tide_sdk.cli import main

    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.chdir(player.folder)
    assert main(["play", target, *words]) == 2
    assert told in capsys.readouterr().err


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, player: Player, *words: str) -> None:
        self.side, inner = pty.openpty()
        self.process = player.start(*words, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
        os.close(inner)
        self.seen = ""

    def until(self, words: str, after: int = 0) -> None:
        """Read until it shows these words."""
        end_s = time.monotonic() + 60
        while words not in self.seen[after:]:
            assert time.monotonic() < end_s, self.seen
            try:
                self.seen += os.read(self.side, 4096).decode("utf-8", "replace")
            except OSError:  # the other side is closed: Linux says so with an error
                assert words in self.seen[after:], self.seen
                return

    def type(self, typed: str) -> None:
        os.write(self.side, typed.encode())

    def rest(self) -> int:
        """Read to the end; the exit code."""
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            if not select.select((self.side,), (), (), 2.0)[0]:
                continue
            try:
                read = os.read(self.side, 4096)
            except OSError:  # the other side is closed: Linux says so with an error
                break
            if not read:
                break
            self.seen += read.decode("utf-8", "replace")
        os.close(self.side)
        return self.process.wait(30)


def test_a_person_plays_in_a_terminal(player):
    terminal = Terminal(player)
    terminal.until("you> ")
    terminal.type("hello\n")
    terminal.until("heard 'hello'")
    terminal.until("you> ", after=terminal.seen.index("heard"))
    terminal.type("stop\n")
    assert terminal.rest() == 0
    assert "\x1b]0;owned" not in terminal.seen
    assert "\x1b[2J" not in terminal.seen
    assert "the task is over" in terminal.seen


@pytest.mark.parametrize("how", ["ctrl-c", "ctrl-d", "sigterm", "sighup"])
def test_whoever_leaves_ends_the_task(player, how):
    terminal = Terminal(player)
    terminal.until("you> ")
    if how == "ctrl-d":
        terminal.type("\x04")
    else:
        sign = {"sigterm": signal.SIGTERM, "ctrl-c": signal.SIGINT, "sighup": signal.SIGHUP}[how]
        terminal.process.send_signal(sign)
    assert terminal.rest() == 0
    assert '"reason": "the person left"' in terminal.seen


# The system gives the signal to the other thread, so that it does not interrupt the main thread's read, as little as
# one that comes just before the read does.
MISSED = """
import signal, sys, threading
from tide_sdk.play.session import Keyboard
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.signal(signal.SIGTERM, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
try:
    Keyboard(sys.stdin, sys.stdout).line("you> ") if sys.stdin.isatty() else print("you> ", flush=True)
    Keyboard(sys.stdin, sys.stdout).line("more> ")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_signal_that_the_read_does_not_see_is_seen_soon(kind):
    if kind == "terminal":
        side, stdin = pty.openpty()
    else:
        stdin, side = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", MISSED], stdin=stdin, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"you> "
        process.send_signal(signal.SIGTERM)
        assert b"interrupted" in process.communicate(timeout=30)[0]
    finally:
        process.kill()
        os.close(side)
        os.close(stdin)
