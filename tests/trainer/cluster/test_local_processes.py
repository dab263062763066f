"""Children are started, announced, measured, and ended with all that they started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tide_trainer.cluster import proc
from tide_trainer.cluster.local import ChildFailed, ChildProcess, LocalProcesses
from tide_trainer.errors import ProcessFailed

SLEEP = "import time; time.sleep(600)"
# A child with a grandchild in its own session, as an environment server may be, and one in ours
# that ignores SIGTERM and has lost our environment.
FAMILY = textwrap.dedent("""
    import signal, subprocess, sys, time
    calm = "import time; time.sleep(600)"
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    stubborn = deaf + "print('up', flush=True); time.sleep(600)"
    a = subprocess.Popen([sys.executable, "-S", "-c", calm], start_new_session=True)
    b = subprocess.Popen([sys.executable, "-S", "-c", stubborn], stdout=subprocess.PIPE, env={})
    b.stdout.readline()
    print(a.pid, b.pid, flush=True)
    time.sleep(600)
""")


@pytest.fixture
async def processes(tmp_path: Path):
    processes = LocalProcesses(tmp_path / "logs")
    yield processes
    await processes.stop_all(5.0)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


async def until(condition, what: str, limit_s: float = 20.0):
    async with asyncio.timeout(limit_s):
        while not (value := condition()):  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.01)
    assert value, what
    return value


async def family(processes: LocalProcesses) -> tuple[ChildProcess, list[int]]:
    child = await processes.spawn("family", python(FAMILY))
    text = await until(lambda: child.log_path.read_text().strip(), "the grandchildren's pids")
    return child, [int(word) for word in text.split()]


def gone(pids: list[int]) -> bool:
    return all(proc.read_process(pid) is None for pid in pids)


async def test_announcement_makes_it_ready(processes):
    code = textwrap.dedent("""
        import json, os, sys, time
        path = sys.argv[2]
        with open(path + ".part", "w") as file:
            json.dump({"url": "http://h:1", "pid": os.getpid()}, file)
        os.rename(path + ".part", path)
        time.sleep(600)
    """)
    child = await processes.spawn("server", python(code), announce=True)
    assert child.url == "http://h:1"
    assert child.announced["pid"] == child.pid
    assert child.alive


async def test_early_death_is_a_typed_error_with_the_logs_tail(processes):
    code = "import sys; print('no port free', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ProcessFailed, match="no port free") as caught:
        await processes.spawn("server", python(code), announce=True)
    assert isinstance(caught.value, ChildFailed)
    assert caught.value.exit_code == 3
    assert processes.children == ()


async def test_missing_program_is_a_typed_error(processes):
    with pytest.raises(ChildFailed, match="cannot run /does/not/exist"):
        await processes.spawn("server", ["/does/not/exist"], announce=True)


async def test_a_child_that_never_announces_is_ended(processes):
    with pytest.raises(ChildFailed, match="not ready within") as caught:
        await processes.spawn("server", python(SLEEP), announce=True, ready_timeout_s=0.3)
    assert caught.value.exit_code is None
    assert processes.children == ()


async def test_names_are_unique_and_plain(processes):
    await processes.spawn("one", python(SLEEP))
    for name in ("one", "", "../one", ".one"):
        with pytest.raises(ValueError, match="name"):
            await processes.spawn(name, python(SLEEP))


async def test_wait_dead_gives_the_exit_code_and_frees_the_name(processes):
    child = await processes.spawn("once", python("import sys; sys.exit(7)"))
    assert await child.wait_dead() == 7
    killed = await processes.spawn("once", python(SLEEP))
    os.kill(killed.pid, signal.SIGKILL)
    assert await killed.wait_dead() == -signal.SIGKILL


async def test_environment_is_added_to_ours(processes):
    child = await processes.spawn(
        "env", python("import os; print(os.environ['TIDE_X'], 'PATH' in os.environ)"), env={"TIDE_X": "y"}
    )
    await child.wait_dead()
    assert child.tail() == "y True"
    assert child.log_path.stat().st_mode & 0o777 == 0o600


async def test_stop_all_ends_grandchildren_even_in_their_own_session(processes):
    child, pids = await family(processes)
    await asyncio.gather(processes.stop_all(2.0), processes.stop_all(2.0))
    assert not child.alive
    assert gone(pids)
    assert processes.children == ()
    await processes.stop_all(2.0)


async def test_a_killed_child_takes_its_session_with_it(processes):
    child, pids = await family(processes)
    os.kill(child.pid, signal.SIGKILL)
    await child.wait_dead()
    await until(lambda: gone(pids[1:]), "the grandchild of the session")
    assert not gone(pids[:1]), "what has its own session may be adopted by a successor"
    await processes.stop_all(2.0)
    assert gone(pids)


async def test_stopping_one_leaves_the_others(processes):
    one, two = await processes.spawn("one", python(SLEEP)), await processes.spawn("two", python(SLEEP))
    await processes.stop(one, 5.0)
    assert not one.alive
    assert two.alive


async def test_cpu_and_memory_are_counted_over_the_tree(processes):
    code = textwrap.dedent("""
        import subprocess, sys, time
        x = bytearray(64 << 20)
        subprocess.run([sys.executable, "-S", "-c", "for i in range(6_000_000): pass"])
        print("ok", flush=True)
        time.sleep(600)
    """)
    child = await processes.spawn("busy", python(code))
    await until(lambda: child.tail() == "ok", "the work")
    cpu_s = processes.cpu_seconds(child)
    assert cpu_s > 0.05
    assert processes.peak_rss_bytes(child) > 64 << 20
    await processes.stop(child, 5.0)
    assert processes.cpu_seconds(child) >= cpu_s


@pytest.mark.parametrize("also_guard", [False, True])
async def test_no_orphan_after_the_parent_is_killed(tmp_path, also_guard):
    code = textwrap.dedent(f"""
        import asyncio, sys
        from tide_trainer.cluster.local import LocalProcesses
        async def main():
            processes = LocalProcesses({str(tmp_path / "logs")!r})
            await processes.remove_at_end({str(tmp_path / "weights of a run")!r})
            child = await processes.spawn("family", [sys.executable, "-S", "-c", {FAMILY!r}])
            while not (text := child.log_path.read_text().strip()):
                await asyncio.sleep(0.01)
            print(child.pid, text, processes._guard.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    folder = tmp_path / "weights of a run"
    folder.mkdir()
    (folder / "v0").write_text("weights")
    parent = subprocess.Popen(  # noqa: ASYNC220 - its pipe is read off the loop
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in (await asyncio.to_thread(parent.stdout.readline)).split()]
    child, guard = pids[0], pids[-1]
    try:
        if also_guard:
            os.kill(guard, signal.SIGKILL)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        await until(lambda: gone([child] if also_guard else pids), "the tree's end")
        assert folder.exists() == also_guard
    finally:
        for pid in pids:
            if proc.read_process(pid) is not None:
                os.kill(pid, signal.SIGKILL)
