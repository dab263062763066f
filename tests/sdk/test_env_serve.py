"""`tide-env serve` as a real process: exactly once over the network, announcing, stopping, refusing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tide_sdk import cli, serve, server
from tide_sdk.client import GatewayClient
from tide_sdk.errors import TideError
from tide_sdk.http import LeanClient
from tide_sdk.wire import HealthResponse

COMMAND = [sys.executable, "-m", "tide_sdk.cli", "serve"]
MODULE = """
    import os, time
    from tide_sdk.environment import Environment, Start, Step

    class Journal(Environment):
        '''Writes each action to a file, slowly.'''
        def __init__(self, file="journal", pause_s=0.05):
            self.file, self.pause_s = file, pause_s
        def start(self, task):
            return Start("go")
        def step(self, message):
            time.sleep(self.pause_s)
            with open(self.file, "a") as file:
                file.write(message.text + "\\n")
            return Step("ok", reward=1.0)

    class Broken(Journal):
        def step(self, message):
            time.sleep(3600)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "journal_env.py").write_text(textwrap.dedent(MODULE))
    return tmp_path


def wait_for_file(path: Path, process: subprocess.Popen) -> dict:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return json.loads(path.read_text())


@contextmanager
def serving(folder: Path, *arguments: str, target="journal_env:Journal"):
    announce = folder / "announce.json"
    command = [*COMMAND, target, "--announce", str(announce), *arguments]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        announced = wait_for_file(announce, process)
        assert announced["pid"] == process.pid
        yield announced["url"], process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("uds", [False, True])
async def test_each_turn_acts_once_however_often_and_from_wherever_it_is_sent(folder, uds):
    where = ["--uds", str(folder / "env.sock")] if uds else []
    with serving(folder, *where, "--set", "pause_s=0.02", "--capacity", "2") as (url, process):
        assert url.startswith("unix:/" if uds else "http://127.0.0.1:")
        async with LeanClient(url) as lean, GatewayClient(url) as one, GatewayClient(url) as other:
            health = HealthResponse.model_validate(await lean.json("GET", "/health"))
            assert (health.environment, health.capacity) == ("Journal", 2)
            first, again = await asyncio.gather(one.start("e", "k"), other.start("e", "k"))
            assert first == again
            for turn in range(3):
                message = {"role": "assistant", "content": f"act {turn}"}
                calls = [client.observe(first.task_id, turn, message) for client in (one, other, one, other)]
                hasty = asyncio.create_task(one.observe(first.task_id, turn, message))
                await asyncio.sleep(0)
                hasty.cancel()  # its connection is cut while the environment acts
                answers = await asyncio.gather(*calls)
                assert all(answer == answers[0] for answer in answers)
                with pytest.raises(TideError, match="turn_conflict"):
                    await one.observe(first.task_id, turn, {"role": "assistant", "content": "else"})
            account = await one.end(first.task_id)
        assert (account.reward, account.turns) == (3.0, 3)
        assert (folder / "journal").read_text() == "act 0\nact 1\nact 2\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert not (folder / "env.sock").exists()


async def test_a_method_that_blocks_does_not_hold_up_the_stop_and_who_waits_for_it_is_told(folder):
    with serving(folder, target="journal_env:Broken") as (url, process):
        async with GatewayClient(url) as client:
            task = await client.start("e", "k")
            stuck = asyncio.create_task(
                client.observe(task.task_id, 0, {"role": "assistant", "content": "x"}, deadline_s=30)
            )
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 30) == 0
            assert serve.STOP_LIMIT_S + server.CLOSE_LIMIT_S < 5
            with pytest.raises(TideError, match="ended"):
                await stuck


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_server_dies_with_its_parent(folder):
    announce = folder / "announce.json"
    command = [*COMMAND, "journal_env:Journal", "--announce", str(announce)]
    code = f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, "TIDE_PARENT_DEATH": "1"}, stderr=subprocess.PIPE
    )
    child = wait_for_file(announce, parent)["pid"]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["journal_env"], "module:Class"),
        (["nowhere_env:X"], "cannot import 'nowhere_env'"),
        (["journal_env:Nope"], "not a subclass"),
        (["journal_env:os"], "not a subclass"),
        (["journal_env:Journal", "--set", "color=red"], "unexpected keyword argument 'color'"),
        (["journal_env:Journal", "--set", "color"], "key=value"),
        (["journal_env:Journal", "--host", "0.0.0.0"], "--allow-public"),
        (["journal_env:Journal", "--capacity", "0"], "--capacity"),
        (["journal_env:Journal", "--port", "99999"], "cannot listen"),
        (["journal_env:Journal", "--port", "TAKEN"], "cannot listen"),
        ([], "MODULE:CLASS"),
    ],
)
def test_a_wrong_call_ends_with_2_and_one_clear_line(folder, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        try:
            code = cli.main(["serve", *(port if word == "TAKEN" else word for word in arguments)])
        except SystemExit as stopped:
            code = stopped.code
    assert code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
