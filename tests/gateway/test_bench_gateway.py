"""The benchmark of the gateway: its client sees every lie, its verdicts are right, and a short run measures."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from bench_gateway import parse_arguments
from gateway_load import Load
from gateway_plan import LoadFailed, Plan, Taken
from gateway_report import Row, Rows, goals, percentile_ms, progress, verdicts
from process_times import Processes, cpu_times_s

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_gateway.py"
RUN_S = 100
SPIN = "while True: pass"

Answer = tuple[int, dict] | None
Reply = Callable[[str, dict], Answer | Awaitable[Answer]]


def play_well(path: str, body: dict) -> tuple[int, dict]:
    """The contract's answers to tasks of one turn, as far as the client looks at them."""
    match path:
        case "/start":
            return 201, {"task_id": body["key"]}
        case "/observation":
            turn = body["turn"] + 1
            return 200, {"turn": turn, "terminated": True}
        case "/pause":
            return 200, {"state": "paused"}
        case "/resume":
            return 200, {"state": "waiting"}
        case _:
            return 200, {}


@asynccontextmanager
async def answering(reply: Reply) -> AsyncIterator[str]:
    """The address of a server that answers each call with `reply`, and hangs up where that is None."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                answer = reply(line.split()[1].decode(), json.loads(await reader.readexactly(length)))
                if inspect.isawaitable(answer):
                    answer = await answer
                if answer is None:
                    break
                body = json.dumps(answer[1], separators=(",", ":")).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (answer[0], len(body)))
                await writer.drain()
                # In two pieces: an answer may come in any.
                writer.write(body)
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def play(reply: Reply, **options) -> Taken:
    async with answering(reply) as url:
        plan = Plan(url, "key", **{"tasks": 2, "turns": 1, "warm_s": 0.0, "window_s": 0.05, **options})
        return await Load(plan).play(lambda: None)


async def test_every_answered_call_is_counted():
    told: list[str] = []

    def reply(path, body):
        told.append(path)
        return play_well(path, body)

    taken = await play(reply, pausers=1)
    assert taken.all_turns == told.count("/observation") >= taken.turns == len(taken.turn_s) == sum(taken.progress) > 0
    assert len(taken.pause_s) > 0
    assert told.count("/start") == told.count("/end")
    assert taken.cpu_s["client"] > 0


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/start", (503, {"code": "unavailable"}), "unavailable"),
        ("/observation", (200, {"turn": 2, "terminated": True}), "turn 1 was answered with"),
        ("/observation", (200, {"turn": 1, "terminated": False}), "turn 1 was answered with"),
        ("/observation", None, "closed"),
        ("/pause", (200, {"state": "pausing"}), "/pause answered"),
        ("/resume", (200, {"state": "paused"}), "/resume answered"),
        ("/end", (500, {"code": "internal"}), "internal"),
    ],
)
async def test_a_wrong_answer_ends_the_measurement_and_is_shown(path, answer, words):
    with pytest.raises(LoadFailed, match=words):
        await play(lambda asked, body: answer if asked == path else play_well(asked, body), pausers=1)


async def test_a_gateway_that_is_killed_leaves_the_turns_that_it_answered():
    left = iter(range(7))

    def reply(path, body):
        return play_well(path, body) if path != "/observation" or next(left, None) is not None else None

    taken = await play(reply, tasks=1, until_cut=True)
    assert taken.all_turns == 7
    assert taken.answered == {f"key/{number}": int(number < 8) for number in range(1, 9)}


def test_the_cpu_time_of_children_counts_where_it_is_asked_for():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            both = {"alone": Processes((process.pid,)), "family": Processes((process.pid,), with_children=True)}
            while (used_s := cpu_times_s(both))["family"] < used_s["alone"] + 0.2:
                assert process.poll() is None
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def row(route: str, load: str = "32", server: str = "fastapi", round: int = 0, **options) -> Row:
    usual = {
        "window_s": 2.0,
        "turns": 100,
        "turn_s": [0.01] * 99 + [0.02],
        "progress": [50, 50],
        "pace_s": [0.01, 0.01],
    }
    return Row(round, server, route, load, Taken(**{**usual, **options}))


def test_figures_are_medians_of_comparisons_within_a_round():
    rows = Rows(
        [
            row("alone", turns=400), row("sqlite", turns=200, cpu_s={"gateway": 0.1}, turn_s=[0.03]),
            row("alone", round=1, turns=40), row("sqlite", round=1, turns=30, cpu_s={"gateway": 0.03}, turn_s=[0.03]),
            row("alone", round=2, turns=400), row("sqlite", round=2, turns=80, cpu_s={"gateway": 0.08}, turn_s=[0.03]),
        ]
    )  # fmt: skip
    figures = rows.figures("fastapi", "sqlite", "32")
    assert figures["of_baseline"] == 0.5
    assert figures["turns_per_s"] == 40.0
    assert figures["cpu_ms_per_turn"] == {"gateway": 1.0}
    assert figures["added_p50_ms"] == pytest.approx(20.0)
    assert "added_p50_ms" not in rows.figures("fastapi", "alone", "32")


def test_a_row_without_a_turn_has_no_figures_rather_than_good_ones():
    figures = Rows([row("sqlite", turns=0, turn_s=[], cpu_s={"gateway": 0.1})]).figures("fastapi", "sqlite", "32")
    assert figures["cpu_ms_per_turn"]["gateway"] is None
    assert (figures["turn_p50_ms"], figures["of_baseline"]) == (None, None)


def test_percentiles_are_of_milliseconds():
    assert percentile_ms([], 99) is None
    assert percentile_ms([0.5], 99) == 500.0
    assert percentile_ms([number / 1000 for number in range(101)], 99) == pytest.approx(99.0)


def test_a_slot_at_under_half_of_the_median_pace_is_starved():
    even = Taken(progress=[10, 10, 10], pace_s=[0.1, 0.1, 0.1])
    assert progress([even]) == {"min": 10, "median": 10, "max": 10, "starved": 0}
    slow = Taken(progress=[4, 10, 12], pace_s=[0.21, 0.1, 0.08])
    assert progress([even, slow]) == {"min": 4, "median": 10, "max": 12, "starved": 1}
    assert progress([Taken(progress=[5, 10, 12], pace_s=[0.2, 0.1, 0.08])])["starved"] == 0
    assert progress([Taken(progress=[0, 0, 0], pace_s=[0.1, 0.1, math.inf])])["starved"] == 1


async def test_a_task_that_waits_while_others_are_answered_is_starved():
    done = asyncio.Event()

    async def reply(path, body):
        if path == "/observation" and body["task_id"] == "key/1":
            await done.wait()
        return play_well(path, body)

    async with answering(reply) as url:
        load = Load(Plan(url, "key", tasks=3, turns=1, warm_s=0.0, window_s=0.2))
        taken = await load.play(lambda: None, done.set)
    assert progress([taken])["starved"] == 1
    assert taken.progress[0] == 0


def figures_of(**values) -> dict:
    cpu, of_baseline, sdk, starved, pause, start = (
        values.get(name, good)
        for name, good in (
            ("cpu", 0.5), ("of_baseline", 0.7), ("sdk", 1.1), ("starved", 0), ("pause", 9.0), ("start", 80.0)
        )
    )  # fmt: skip
    return {
        ("fastapi", "sqlite", "32"): {
            "cpu_ms_per_turn": {"gateway": cpu}, "of_baseline": of_baseline, "start_p99_ms": start
        },
        ("sdk", "sqlite", "32"): {"of_baseline": sdk},
        ("fastapi", "postgres", "256"): {"progress": {"starved": starved}},
        ("fastapi", "sqlite", "32+pauses"): {"pause_p99_ms": pause},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "goal"),
    [
        ({"cpu": 0.61}, "gateway_cpu_ms_per_turn"),
        ({"of_baseline": 0.59}, "of_baseline"),
        ({"sdk": 0.99}, "sdk_server_of_baseline"),
        ({"starved": 1}, "starved_at_256"),
        ({"pause": 20.1}, "pause_p99_ms"),
        ({"start": 501.0}, "warm_start_p99_ms"),
    ],
)
def test_each_goal_is_judged_by_itself(bad, goal):
    assert all(one["holds"] for one in goals(figures_of(), True).values())
    told = goals(figures_of(**bad), True)
    assert {name for name, one in told.items() if not one["holds"]} == {goal}
    assert "FAILS" in verdicts(told)
    assert not goals(figures_of(), False)["every_turn_stored"]["holds"]


def test_what_was_not_measured_holds_nothing():
    assert {one["holds"] for one in goals({}, None).values()} == {None}


def test_names_that_do_not_exist_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--loads", "32,33"])
    assert "'33' is none of 1, 32, 256" in capsys.readouterr().err


def test_a_quick_run_measures_and_finds_every_turn_in_the_database(tmp_path):
    argv = [sys.executable, str(BENCH), "--quick", "--loads", "32,32+pauses", "--directory", str(tmp_path)]
    done = subprocess.run(
        [*argv, "--output", str(tmp_path / "result.json")], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    assert (tmp_path / "result.json").read_text() == last + "\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "result.json"], "files are left"
    result = json.loads(last)
    assert list(result) == ["name", "value", "unit", "goal", "holds", "details"]
    assert result["value"] > 0
    assert result["holds"] is None, "a quick run judges nothing"
    row = result["details"]["rows"]["fastapi sqlite 32"]
    assert 0 < row["of_baseline"] < 1
    assert set(row["cpu_ms_per_turn"]) == {"gateway", "environment", "client"}
    assert result["details"]["rows"]["fastapi sqlite 32+pauses"]["pauses"] > 0
    evidence = result["details"]["evidence"]
    assert evidence["fastapi-sqlite"]["intents"] == evidence["fastapi-sqlite"]["answered"] > 0
    assert evidence["fastapi-sqlite after kill -9"]["lost"] == 0
