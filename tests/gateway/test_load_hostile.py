"""Hostile callers against a real gateway process: refused with the right code, memory bounded, others served."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from bystander import Bystander
from gateway_process import Replica
from hostile import MIB, Answer, Hostile, Memory, action, counted, read_answer
from scripted_gateway import ENVIRONMENT, start_gateway

from tide_gateway.load import LoadLimits
from tide_sdk.serve import raise_file_limit

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"
SLACK_BYTES = 64 * MIB
BUDGET_BYTES = LoadLimits().max_bytes
ENOUGH_TURNS = 20
"""What the bystander has to play while an attack goes on."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Replica]:
    raise_file_limit()
    folder = tmp_path_factory.mktemp("hostile")
    running = start_gateway(folder, f"sqlite:///{folder / 'gateway.db'}", f"ann/operator:{ANN},bob:{BOB}")
    yield running
    assert running.stop() == 0, running.text()
    assert "Traceback" not in running.text()


@pytest.fixture
async def ann(site) -> AsyncIterator[Hostile]:
    caller = Hostile(site.url, ANN)
    yield caller
    await caller.close()


@pytest.fixture(scope="module")
def bob(site, tmp_path_factory) -> Iterator[Bystander]:
    """Plays all the time; no call of its may be refused."""
    playing = Bystander.start(site.url, BOB, ENVIRONMENT, tmp_path_factory.mktemp("bystander") / "turns")
    yield playing
    playing.stop()


async def started(ann: Hostile, key: str, **script) -> str:
    body = json.dumps({"environment": ENVIRONMENT, "key": key, "task": script, "limits": {"idle": 100}}).encode()
    answer = await ann.post("/start", body)
    assert answer.status == 201, answer
    return answer.problem["task_id"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_a_hundred_megabytes_is_413_and_not_kept(site, ann, bob, chunked):
    memory = Memory(site.pid)
    piece = b"x" * MIB
    answer = await ann.post("/observation", (piece for _ in range(100)) if chunked else piece * 100)
    assert (answer.status, answer.problem["code"]) == (413, "too_large")
    assert memory.peak_growth() < SLACK_BYTES
    bob.wait_for(ENOUGH_TURNS)


async def test_two_hundred_large_bodies_at_once_are_429_beyond_the_budget_and_keep_nobody_out(site, ann, bob):
    memory, before = Memory(site.pid), bob.turns
    body = action("nobody's", 0, "x" * 10_000_000)
    answers = await asyncio.gather(*(ann.post("/observation", body) for _ in range(200)))
    assert bob.turns - before >= ENOUGH_TURNS
    assert memory.peak_growth() < SLACK_BYTES + BUDGET_BYTES
    found = counted(answers)
    assert set(found) == {404, 429}, found
    refused = next(answer for answer in answers if answer.status == 429)
    assert (refused.problem["code"], refused.problem["reason"]) == ("capacity", "memory")
    assert int(refused.headers["retry-after"]) >= 1
    # What was refused is gone: there is room again.
    assert (await ann.post("/observation", body)).status == 404


DEEP = b"[" * 100_000 + b"]" * 100_000
BODIES = {
    "an object nested 100,000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "an array nested 100,000 deep": b'{"task_id":"t","turn":0,"message":' + DEEP + b"}",
    "a lone surrogate": b'{"task_id":"\\ud800","turn":0}',
    "a lone surrogate in a key": b'{"\\udfff":1,"task_id":"t"}',
    "a number that is infinite": b'{"task_id":"t","turn":1e400}',
    "a number of 5,000 digits": b'{"task_id":"t","turn":' + b"9" * 5000 + b"}",
    "NaN": b'{"task_id":"t","turn":NaN}',
    "a byte order mark": b'\xef\xbb\xbf{"task_id":"t"}',
    "UTF-16": '{"task_id":"t"}'.encode("utf-16"),
    "UTF-8 that is none": b'{"task_id":"\xc3\x28"}',
    "an overlong slash": b'{"task_id":"\xc0\xaf"}',
    "a NUL": b'{"task_id":"a\\u0000b","turn":0}',
    "nothing": b"",
    "half of an object": b'{"task_id":',
}


@pytest.mark.parametrize("what", BODIES)
async def test_what_is_not_plain_json_is_422_at_every_call_with_a_body(site, ann, what):
    memory = Memory(site.pid)
    for path in ("/start", "/observation", "/pause", "/end", "/heartbeat", "/keys"):
        answer = await ann.post(path, BODIES[what])
        too_large = len(BODIES[what]) > 65536 and path not in ("/start", "/observation")
        expected = (413, "too_large") if too_large else (422, "invalid")
        assert (answer.status, answer.problem["code"]) == expected, path
    assert memory.peak_growth() < SLACK_BYTES


async def test_a_compressed_body_is_415(ann):
    for encoding in ("gzip", "br", "identity, gzip"):
        answer = await ann.post("/observation", gzip.compress(action("t", 0, "x")), Content_Encoding=encoding)
        assert (answer.status, answer.problem["code"]) == (415, "media_type")
    assert (await ann.post("/observation", action("t", 0, "x"), Content_Encoding="identity")).status == 404


async def test_of_two_keys_of_one_name_the_one_that_is_checked_is_the_one_that_counts(ann):
    task_id = await started(ann, "twice")
    good, bad = '{"role":"assistant","content":"go"}', '{"role":"robot"}'
    for first, last, status in ((good, bad, 422), (bad, good, 200)):
        body = f'{{"task_id":"{task_id}","turn":0,"message":{first},"message":{last}}}'
        assert (await ann.post("/observation", body.encode())).status == status
    await ann.post("/end", json.dumps({"task_id": task_id}).encode())


async def test_slow_and_silent_callers_hold_little_and_keep_nobody_out(site, ann, bob):
    memory, before = Memory(site.pid), bob.turns
    slow = [await ann.connect() for _ in range(1600)]
    heads, bodies = slow[:300], slow[300:600]
    for _, writer in heads:
        writer.write(b"POST /observation HTTP/1.1\r\nHost: loc")
    for _, writer in bodies:
        writer.write(ann.head("POST", "/observation", Content_Type="application/json", Content_Length=1000) + b"{")
    bob.wait_for(ENOUGH_TURNS)
    answers = await asyncio.gather(*(asyncio.wait_for(read_answer(reader), 60) for reader, _ in heads))
    assert {(answer.status, answer.problem["code"]) for answer in answers} == {(408, "invalid")}
    assert bob.turns - before >= 2 * ENOUGH_TURNS
    assert memory.peak_growth() < SLACK_BYTES


async def test_callers_that_do_not_take_their_answers_hold_no_more_than_the_budget(site, ann, bob):
    task_id = await started(ann, "large", text_bytes=8_000_000)
    first = await ann.post("/observation", action(task_id, 0, "go"))
    assert (first.status, len(first.body) > 8_000_000) == (200, True)
    memory, before = Memory(site.pid), bob.turns
    readers = []
    for _ in range(100):
        reader, writer = await ann.connect()
        # The least that the kernel takes off the gateway's hands.
        writer.transport.pause_reading()
        writer.write(ann.head("GET", f"/observation?task_id={task_id}"))
        readers.append((reader, writer))
    bob.wait_for(ENOUGH_TURNS)
    assert memory.peak_growth() < SLACK_BYTES + BUDGET_BYTES
    answers: list[Answer] = []
    for reader, writer in readers:
        writer.transport.resume_reading()
        answers.append(await asyncio.wait_for(read_answer(reader), 60))
        writer.close()
    found = counted(answers)
    assert set(found) == {200, 429}, found
    assert {answer.problem["reason"] for answer in answers if answer.status == 429} == {"memory"}
    assert bob.turns - before >= ENOUGH_TURNS
    await ann.post("/end", json.dumps({"task_id": task_id}).encode())


async def test_a_flood_of_headers_is_431_and_thousands_of_pipelined_requests_are_cut_off(site, ann, bob):
    memory = Memory(site.pid)
    for fields in ({"X": "a" * 40_000}, {f"X{number}": "a" for number in range(200)}):
        answer = await ann.post("/observation", b"{}", **fields)
        assert (answer.status, answer.problem["code"]) == (431, "too_large")
    task_id = await started(ann, "pipelined", step_s=0.5)
    reader, writer = await ann.connect()
    body = action(task_id, 0, "go")
    first = ann.head("POST", "/observation", Content_Type="application/json", Content_Length=len(body)) + body
    writer.write(first + ann.head("GET", "/capacity") * 5000)
    assert (await asyncio.wait_for(read_answer(reader), 60)).status == 0
    assert memory.peak_growth() < SLACK_BYTES
    await ann.post("/end", json.dumps({"task_id": task_id}).encode())
    bob.wait_for(ENOUGH_TURNS)
