"""What a server keeps of released tasks: their answers, up to a bound, and nothing of the author's."""

from __future__ import annotations

import asyncio
import gc
import resource
import subprocess
import sys
import weakref
from typing import Any

import pytest

from tide_sdk import EndInfo, Environment, Start, Step, instance
from tide_sdk.errors import TideError
from tide_sdk.server import EnvironmentServer


def make_class(*, blocking: bool) -> Any:
    """An environment that does as its task says, and whose instances can be counted."""
    kept: list[weakref.ref[Environment]] = []
    is_blocking = blocking

    class Large(Environment):
        blocking = is_blocking
        made = kept

        def __init__(self) -> None:
            kept.append(weakref.ref(self))

        def start(self, task):
            self.task = task.task
            if self.task.get("fail") == "start":
                raise TideError("invalid", "task: no")
            return Start("x" * self.task.get("num_chars", 1))

        def step(self, message):
            if self.task.get("fail") == "step":
                raise ValueError("broken")
            return Step("y", terminated=True)

        def end(self, reason):
            if self.task.get("fail") == "end":
                raise ValueError("broken")
            return EndInfo()

    return Large


async def play(client, key: str, **task) -> str | None:
    started = (await client.call("POST", "/start", {"environment": "any", "key": key, "task": task}))[1]
    if "task_id" not in started:
        return None
    task_id = started["task_id"]
    message = {"role": "assistant", "content": "a"}
    await client.call("POST", "/observation", {"task_id": task_id, "turn": 0, "message": message})
    await client.call("POST", "/end", {"task_id": task_id})
    return task_id


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("fail", [None, "start", "step", "end"])
async def test_the_authors_object_goes_with_its_task(asgi, monkeypatch, blocking, fail):
    monkeypatch.setattr(instance._log, "disabled", True)  # pytest keeps all records, and with them the exceptions
    kind = make_class(blocking=blocking)
    client = asgi(EnvironmentServer(kind))
    await play(client, "k", fail=fail)
    async with asyncio.timeout(10):
        while any(made() is not None for made in kind.made):
            gc.collect()
            await asyncio.sleep(0.005)
    assert len(kind.made) == 1


async def test_large_answers_are_remembered_up_to_a_bound_of_bytes(asgi):
    client = asgi(EnvironmentServer(make_class(blocking=False), max_remembered_bytes=5_000))
    tasks = [await play(client, f"k{number}", num_chars=1000) for number in range(4)]
    states = [(await client.call("POST", "/end", {"task_id": task_id}))[0] for task_id in tasks]
    assert states == [404, 404, 200, 200]


async def test_the_newest_answer_is_remembered_whatever_its_size(asgi):
    client = asgi(EnvironmentServer(make_class(blocking=False), max_remembered_bytes=10))
    task_id = await play(client, "k", num_chars=1000)
    assert (await client.call("POST", "/end", {"task_id": task_id}))[0] == 200


def test_a_low_limit_of_open_files_is_raised():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    lines = [
        "import resource",
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))",
        "from tide_sdk.serve import MAX_FILES, raise_file_limit",
        "raise_file_limit()",
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MAX_FILES)",
    ]
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=30)
    soft, most = map(int, run.stdout.split())
    assert soft == (most if hard == resource.RLIM_INFINITY else min(most, hard))
