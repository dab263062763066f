"""Checks of health, headers and HTTP itself."""

from __future__ import annotations

import asyncio

from tide_sdk import codec
from tide_sdk.check.answers import Answer, expect, parse, refused
from tide_sdk.check.case import Failed, case
from tide_sdk.check.raw import RawConnection
from tide_sdk.check.talk import Talk
from tide_sdk.wire import CONTRACT_HEADER, CONTRACT_VERSION, HealthResponse

CALLS = "The wire contract, version 1"
_PIECE_PAUSE_S = 0.02


def connect(talk: Talk) -> RawConnection:
    """A connection of bytes to the server."""
    return RawConnection(talk.subject.url, talk.subject.token, talk.plan.timeout_s)


@case("health.fields", CALLS, "GET /health answers contract, environment, capacity, tasks and incarnation.")
async def health_fields(talk: Talk) -> None:
    """The fields, and that they stay what they are."""
    first, second = await talk.health(), await talk.health()
    if first.contract != CONTRACT_VERSION:
        raise Failed(f"GET /health: contract is {first.contract} and not {CONTRACT_VERSION}")
    if first.capacity < 1:
        raise Failed(f"GET /health: capacity is {first.capacity}; it must be at least 1")
    if first.incarnation != second.incarnation:
        raise Failed("GET /health: incarnation differs from call to call; it is drawn once, at the process's start")
    talk.notes.append(f"{first.environment}, capacity {first.capacity}")


@case("health.tasks", CALLS, "tasks in GET /health counts the tasks that the server holds now.")
async def health_tasks(talk: Talk) -> None:
    """One more after a start, one less after an end."""
    before = (await talk.health()).tasks
    task = await talk.start()
    held = (await talk.health()).tasks
    await talk.end(task)
    after = (await talk.health()).tasks
    if (held - before, after - before) != (1, 0):
        raise Failed(f"GET /health: tasks was {before}, {held} after a start, {after} after its end")


@case("http.header", CALLS, "Every answer, an error too, carries Tide-Contract: 1.")
async def header(talk: Talk) -> None:
    """Each endpoint once, and an error of each kind that needs no task."""
    body = talk.start_body()
    answers = [await talk.send("GET", "/health"), await talk.send("POST", "/start", body)]
    task = talk.begun(body, answers[-1])
    answers.append(await talk.get(task.task_id))
    answers.append(await talk.send("POST", "/observation", talk.action_of(task)))
    for path in ("/pause", "/resume", "/end"):
        answers.append(await talk.post(path, task_id=task.task_id))
    answers.append(await talk.post("/end", task_id="unknown"))
    answers.append(await talk.send("POST", "/end", body=b"{"))
    answers.append(await talk.send("GET", "/start"))
    answers.append(await talk.send("POST", "/end", body=b"{}", headers={"Content-Type": "text/plain"}))
    for answer in answers:
        got = answer.response.headers.get(CONTRACT_HEADER.lower())
        if got != str(CONTRACT_VERSION):
            raise Failed(f"{answer.call} ({answer.status}): the header {CONTRACT_HEADER} is {got!r} and not '1'")


@case("http.version", CALLS, "A call that names another version of the contract is refused, and nothing is done.")
async def other_version(talk: Talk) -> None:
    """Version 2 is refused; version 1 is taken."""
    task = await talk.start()
    action = talk.action_of(task)
    refused(await talk.send("POST", "/observation", action, headers={CONTRACT_HEADER: "2"}), "invalid", CONTRACT_HEADER)
    refused(await talk.send("POST", "/start", talk.start_body(), headers={CONTRACT_HEADER: "2"}), "invalid")
    talk.took(task, await talk.send("POST", "/observation", action, headers={CONTRACT_HEADER: "1"}))


@case("http.content_type", CALLS, "Answers are application/json, errors application/problem+json.")
async def content_type(talk: Talk) -> None:
    """Of an answer and of an error; a charset may follow."""
    body = talk.start_body()
    started = await talk.send("POST", "/start", body)
    task = talk.begun(body, started)
    _of_type(started, "application/json")
    _of_type(await talk.get(task.task_id), "application/json")
    _of_type(await talk.send("GET", "/health"), "application/json")
    _of_type(await talk.post("/end", task_id="unknown"), "application/problem+json")


def _of_type(answer: Answer, wanted: str) -> None:
    got = answer.response.headers.get("content-type", "")
    if got.partition(";")[0].strip().lower() != wanted:
        raise Failed(f"{answer.call} ({answer.status}): Content-Type is {got!r} and not {wanted}")


@case("http.charset", CALLS, "A request's Content-Type may name a charset.")
async def charset(talk: Talk) -> None:
    """As many HTTP clients do."""
    body = talk.start_body()
    headers = {"Content-Type": "application/json; charset=utf-8"}
    talk.begun(body, await talk.send("POST", "/start", body, headers=headers))


@case("http.keep_alive", CALLS, "A connection carries call after call.")
async def keep_alive(talk: Talk) -> None:
    """A gateway keeps its connections; one that is closed after each answer costs a new one per turn."""
    async with connect(talk) as connection:
        for number in range(3):
            try:
                await connection.write(connection.head("GET", "/health"))
                response = await connection.read()
            except (ConnectionError, Failed) as error:
                raise Failed(f"GET /health number {number + 1} on one connection: {error}") from error
            parse(HealthResponse, expect(talk.heard("GET", "/health", None, response), 200))


@case("http.pipelined", CALLS, "Calls that follow each other on a connection without waiting are answered in order.")
async def pipelined(talk: Talk) -> None:
    """Two starts in one packet."""
    bodies = [talk.start_body(), talk.start_body()]
    if (await talk.health()).capacity < len(bodies):
        bodies[1] = bodies[0]
    async with connect(talk) as connection:
        await connection.write(b"".join(connection.post("/start", codec.dumps(body)) for body in bodies))
        answers = [talk.heard("POST", "/start", codec.dumps(body), await connection.read()) for body in bodies]
    ids = [talk.begun(body, answer).task_id for body, answer in zip(bodies, answers, strict=True)]
    again = [await talk.send("POST", "/start", body) for body in bodies]
    if [answer.data["task_id"] for answer in again] != ids:
        raise Failed("two starts in one packet: their answers came in the wrong order")


@case("http.in_pieces", CALLS, "A body that comes in small pieces, or chunked, is taken whole.")
async def in_pieces(talk: Talk) -> None:
    """A start a few bytes at a time, and again as chunks: the same start."""
    body = talk.start_body(key="pieces \N{LATIN SMALL LETTER E WITH ACUTE}")
    data = codec.dumps(body)
    async with connect(talk) as connection:
        whole = connection.post("/start", data)
        size = max(1, len(whole) // 6)
        for begin in range(0, len(whole), size):
            await connection.write(whole[begin : begin + size])
            await asyncio.sleep(_PIECE_PAUSE_S)
        task = talk.begun(body, talk.heard("POST", "/start", data, await connection.read()))
    async with connect(talk) as connection:
        head = connection.head("POST", "/start", "Content-Type: application/json", "Transfer-Encoding: chunked")
        pieces = (data[:7], data[7:])
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        await connection.write(head + chunks + b"0\r\n\r\n")
        again = talk.heard("POST", "/start", data, await connection.read())
    if talk.begun(body, again).task_id != task.task_id:
        raise Failed("the same start sent as chunks began another task")


@case("http.half_a_call", CALLS, "A caller that goes away in the middle of its body has done nothing.")
async def half_a_call(talk: Talk) -> None:
    """Half a start, then a whole one with another body: no key_conflict."""
    body = talk.start_body(seed=3)
    async with connect(talk) as connection:
        data = connection.post("/start", codec.dumps(body))
        await connection.write(data[: len(data) - 4])
    await talk.health()
    other = body | {"seed": 4}
    talk.begun(other, await talk.send("POST", "/start", other))


CASES = (
    health_fields,
    health_tasks,
    header,
    other_version,
    content_type,
    charset,
    keep_alive,
    pipelined,
    in_pieces,
    half_a_call,
)
