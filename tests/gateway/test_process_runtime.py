"""What only real processes show: failed launches, ports, folders, leftovers; see test_process_survival for lives."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_bench import SCRIPTED_SERVER
from runtime_bench_process import COMMAND, marked, process_spec

from tide_gateway import upstream
from tide_gateway.host import start_ticks
from tide_gateway.runtimes import Gone, LaunchFailed, Place, process, process_marks
from tide_gateway.runtimes.process import MARK, FolderRefused, ProcessRuntime

SMALL_SERVER = Path(__file__).with_name("small_server.py")
"""The health of the contract, in a process that starts in milliseconds."""


@pytest.fixture
async def processes(tmp_path):
    runtime = make(tmp_path)
    yield runtime
    for name in await runtime.survey():
        await runtime.destroy(name, None, None, 0.0)
    await runtime.close()


def make(tmp_path: Path, deployment: str | None = None, **options) -> ProcessRuntime:
    return ProcessRuntime(os.environ, tmp_path / "logs", deployment or str(tmp_path), **options)


def small_spec(*words: str, **options):
    return process_spec(sys.executable, "-I", "-S", str(SMALL_SERVER), *words, **options)


async def test_a_server_that_exits_is_quoted(processes):
    spec = process_spec(sys.executable, "-c", "import sys; sys.exit('no such level') # {uds}")
    with pytest.raises(LaunchFailed, match=r"exited with code 1 .* no such level"):
        await processes.launch("one", 0, spec, 20.0)


async def test_a_server_is_quoted_without_what_a_terminal_would_obey(processes):
    spec = process_spec(sys.executable, "-c", r"import sys; sys.exit('bad \0 \x1b[2J\x9b level') # {uds}")
    with pytest.raises(LaunchFailed, match=r"bad    \[2J  level"):
        await processes.launch("one", 0, spec, 20.0)


async def test_a_process_that_cannot_be_made_is_a_failed_launch(processes, monkeypatch):
    def no_process(*_args, **_options):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(LaunchFailed, match="Resource temporarily unavailable"):
        await processes.launch("one", 0, process_spec("true", "{uds}"), 20.0)


async def test_a_command_that_does_not_exist_is_named(processes):
    with pytest.raises(LaunchFailed, match="cannot execute 'no-such-command'"):
        await processes.launch("one", 0, process_spec("no-such-command", "{uds}"), 20.0)


@pytest.mark.parametrize("url", ["ftp://x", "http://127.0.0.1:99999", "http://u:p@h", "unix:relative", "http://[::1"])
async def test_a_server_that_announces_no_url_is_a_failed_launch(processes, url):
    code = f"import json, sys, time; json.dump({{'url': {url!r}}}, open(sys.argv[1], 'w')); time.sleep(300)"
    with pytest.raises(LaunchFailed, match=r"announced .* which is no URL"):
        await processes.launch("one", 0, process_spec(sys.executable, "-c", code, "{announce}"), 20.0)


async def test_a_server_that_never_listens_is_killed_with_its_children(processes, tmp_path):
    script = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '300']); time.sleep(300) # {uds}"
    with pytest.raises(LaunchFailed, match="not healthy within 1 s"):
        await processes.launch("never-listens", 0, process_spec(sys.executable, "-c", script), 1.0)
    assert marked(f"{tmp_path}/never-listens") == []


async def test_a_launch_that_is_cancelled_again_while_it_cleans_up_still_leaves_nothing(
    processes, tmp_path, eventually
):
    spec = process_spec(sys.executable, "-c", "import time; time.sleep(300) # {uds}")
    launching = asyncio.create_task(processes.launch("one", 0, spec, 20.0))
    await eventually(lambda: len(marked(f"{tmp_path}/one")) == 2, "it runs")
    for _ in range(3):
        launching.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await launching
    await processes.close()
    assert marked(f"{tmp_path}/one") == []


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(processes, tmp_path):
    script = (
        "import signal, runpy, sys; signal.signal(15, signal.SIG_IGN); sys.argv = sys.argv[1:];"
        f"runpy.run_path({SCRIPTED_SERVER!r}, run_name='__main__')"
    )
    server = await processes.launch("one", 0, process_spec(sys.executable, "-c", script, "x", "--uds", "{uds}"), 20.0)
    await processes.destroy("one", None, server.place, 0.2)
    assert server.exited.is_set()
    assert marked(f"{tmp_path}/one") == []


async def test_a_stopped_supervisor_does_not_save_its_server(processes, tmp_path):
    server = await processes.launch("one", 0, process_spec(), 20.0)
    os.kill(server.place.pid, signal.SIGSTOP)
    await processes.destroy("one", None, server.place, 0.1)
    assert marked(f"{tmp_path}/one") == []


async def test_a_server_that_is_asked_to_stop_has_its_grace_to_do_so(processes, tmp_path):
    told = tmp_path / "told"
    spec = small_spec("--told", str(told), "--uds", "{uds}")
    server = await processes.launch("one", 0, spec, 20.0)
    await processes.freeze(server, True)  # even a frozen one
    await processes.destroy("one", spec, server.place, 20.0)
    assert told.read_text() == "told to stop"


async def test_leftovers_are_found_by_their_mark_and_nobody_else_is_touched(processes, tmp_path, eventually):
    mine, other = f"{tmp_path}/left-a", f"{tmp_path}-other/left-a"
    left = await asyncio.create_subprocess_exec("sleep", "300", env={**os.environ, MARK: mine})
    kept = await asyncio.create_subprocess_exec("sleep", "300", env={**os.environ, MARK: other})
    await eventually(lambda: marked(mine) and marked(other), "both run")
    assert await processes.survey() == {"left-a"}
    await processes.destroy("left-a", None, None, 1.0)
    async with asyncio.timeout(10):
        assert await left.wait() == -signal.SIGKILL
    assert marked(other) == [kept.pid]
    kept.kill()
    await kept.wait()


async def test_destroys_at_the_same_time_share_one_scan(processes, monkeypatch):
    scans = []
    honest = process_marks.scan
    monkeypatch.setattr(process_marks, "scan", lambda prefix: (scans.append(prefix), honest(prefix))[1])
    await asyncio.gather(*(processes.destroy(f"never-{number}", None, None, 1.0) for number in range(200)))
    assert 1 <= len(scans) <= 3


@pytest.mark.parametrize("place", ["announce", "port"])
async def test_servers_may_announce_themselves_or_take_a_port(processes, place):
    spec = process_spec(sys.executable, SCRIPTED_SERVER, f"--{place}", "{" + place + "}", "--capacity", "{capacity}")
    server = await processes.launch("one", 0, spec, 20.0)
    assert (await upstream.probe(server)).capacity == 8
    assert (await processes.attach("one", spec, server.place, 20.0)).place == server.place


async def test_g19_200_parallel_starts_do_not_fail_by_port_races(processes):
    spec = small_spec("--port", "{port}")
    names = [f"s{number}" for number in range(200)]
    servers = await asyncio.gather(*(processes.launch(name, 0, spec, 100.0) for name in names))
    assert len({server.place.url for server in servers}) == 200
    assert len({server.health.incarnation for server in servers}) == 200
    await asyncio.gather(*(processes.destroy(name, spec, None, 5.0) for name in names))
    assert await processes.survey() == set()


async def test_another_server_on_the_port_is_not_taken_for_ours_and_a_further_port_is_tried(processes, monkeypatch):
    spec = small_spec("--port", "{port}")
    other = await processes.launch("other", 0, spec, 20.0)
    taken = int(other.place.url.rpartition(":")[2])
    ports = [taken, taken, process.free_port()]
    monkeypatch.setattr(process, "free_port", lambda: ports.pop(0))
    server = await processes.launch("one", 0, spec, 20.0)
    assert ports == []
    assert server.health.incarnation != other.health.incarnation


async def test_a_port_that_is_always_taken_fails_the_launch(processes, monkeypatch):
    spec = small_spec("--port", "{port}")
    other = await processes.launch("other", 0, spec, 20.0)
    monkeypatch.setattr(process, "free_port", lambda: int(other.place.url.rpartition(":")[2]))
    with pytest.raises(LaunchFailed, match="in use"):
        await processes.launch("one", 0, spec, 20.0)


async def test_a_process_that_is_another_one_is_not_attached_to(processes):
    server = await processes.launch("one", 0, process_spec(), 20.0)
    place = server.place
    for wrong, words in [
        (Place(place.url, place.host, place.pid, "1"), "does not run"),  # the id was used again
        (Place(place.url, place.host, os.getpid(), str(start_ticks(os.getpid()))), "does not run"),
        (Place(place.url, place.host), "does not run"),
        (Place(place.url, "elsewhere:0123456789ab", place.pid, place.handle), "runs on elsewhere"),
    ]:
        with pytest.raises(Gone, match=words):
            await processes.attach("one", process_spec(), wrong, 5.0)
    with pytest.raises(Gone):
        await processes.attach("two", process_spec(), place, 5.0)
    await processes.destroy("one", None, Place(place.url, "elsewhere:0123456789ab", place.pid), 0.0)
    await upstream.probe(server)
    await processes.destroy("one", None, Place(place.url), 0.0)
    assert server.exited.is_set()


async def test_a_server_that_does_not_answer_is_not_attached_to_and_not_destroyed(processes):
    server = await processes.launch("one", 0, process_spec(), 20.0)
    await processes.freeze(server, True)
    with pytest.raises(Gone, match="not healthy within"):
        await processes.attach("one", process_spec(), server.place, 0.5)
    await processes.freeze(server, False)
    await upstream.probe(server)


async def test_the_run_folder_is_private_and_removed_when_nothing_lives_in_it(tmp_path):
    first, second = make(tmp_path), make(tmp_path)
    server = await first.launch("one", 0, process_spec(), 20.0)
    folder = Path(server.channel.base_url.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o077 == 0
    await first.close()
    await upstream.probe(await second.attach("one", process_spec(), server.place, 20.0))
    await second.destroy("one", None, server.place, 1.0)
    await second.close()
    assert not folder.exists()


async def test_two_deployments_in_one_run_folder_do_not_meet(tmp_path, eventually):
    first, second = (make(tmp_path, f"{tmp_path}-{number}", run_dir=tmp_path / "r", outlive_s=1.0) for number in (1, 2))
    one, other = [await runtime.launch("one", 0, process_spec(), 20.0) for runtime in (first, second)]
    assert one.place.url != other.place.url
    with pytest.raises(Gone):
        await second.attach("one", process_spec(), one.place, 5.0)
    await second.destroy("one", None, one.place, 0.0)  # it has one of that name, but this is not it
    await upstream.probe(one)
    assert (await first.survey(), await second.survey()) == ({"one"}, set())
    await first.destroy("one", None, one.place, 0.0)
    await first.close()
    await second.close()


async def test_a_run_folder_that_somebody_cleaned_away_is_made_again(tmp_path, eventually):
    runtime = make(tmp_path, run_dir=tmp_path / "r", outlive_s=1.0)
    await runtime.open()
    shutil.rmtree(tmp_path / "r")
    await eventually((tmp_path / "r" / "alive").exists, "it shows life again")
    await runtime.launch("one", 0, process_spec(), 20.0)
    await runtime.destroy("one", None, None, 0.0)
    await runtime.close()


@pytest.mark.parametrize("kind", ["open", "link", "file", "long"])
async def test_a_run_folder_that_cannot_be_trusted_is_refused(tmp_path, kind):
    folder = tmp_path / ("x" * 100 if kind == "long" else "run")
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    elif kind == "file":
        folder.write_text("")
    runtime = make(tmp_path, run_dir=folder)
    with pytest.raises(FolderRefused, match=folder.name):
        await runtime.open()
    with pytest.raises(LaunchFailed, match=folder.name):
        await runtime.launch("one", 0, process_spec(), 20.0)
    assert await runtime.survey() == set()
    await runtime.close()


async def test_logs_of_silent_servers_are_removed_and_the_others_kept_up_to_a_number(processes, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_gateway.runtimes.process_places.NUM_LOGS", 2)
    server = await processes.launch("silent", 0, process_spec(), 20.0)
    await processes.destroy("silent", None, server.place, 1.0)
    for number in range(4):
        with pytest.raises(LaunchFailed, match=r"last words: bye \(log"):
            await processes.launch(f"s{number}", 0, process_spec("sh", "-c", "echo bye # {uds}"), 20.0)
        os.utime(tmp_path / "logs" / f"s{number}.log", (number, number))
    await processes.launch("living", 0, process_spec("sh", "-c", 'echo hello; exec "$@"', "x", *COMMAND), 20.0)
    os.utime(tmp_path / "logs" / "living.log", (0, 0))
    await processes.survey()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"s2.log", "s3.log", "living.log"}
