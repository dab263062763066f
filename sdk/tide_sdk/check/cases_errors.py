"""Checks of what is refused: bodies that are not the contract's, and how errors look."""

from __future__ import annotations

from typing import Any

from tide_sdk import codec
from tide_sdk.check.answers import Answer, expect, refused
from tide_sdk.check.case import Failed, case
from tide_sdk.check.cases_http import CALLS, connect
from tide_sdk.check.talk import Talk
from tide_sdk.errors import CODES
from tide_sdk.wire import MAX_EPOCH, MAX_KEY_CHARS, MAX_LIMIT_S

ERRORS = "Errors"
POSTS = ("/start", "/observation", "/pause", "/resume", "/end")
TOO_LARGE_BYTES = 33 * 1024 * 1024
"""More than the contract's 16 MiB, and than the 32 MiB that the SDK's own server takes."""
_LEVELS = 100_000
_BLOCK = b" " * (1024 * 1024)
_MALFORMED = {
    "nothing": b"",
    "half an object": b'{"task_id": ',
    "a list": b"[]",
    "a string": b'"task"',
    "bytes that are not UTF-8": b'{"task_id": "\xff\xfe"}',
    "begun with a byte order mark": b'\xef\xbb\xbf{"task_id": "x"}',
    "NaN": b'{"task_id": NaN}',
    "a number beyond a double": b'{"task_id": 1e999}',
    "two values": b"{} {}",
}


@case("errors.problem", ERRORS, "An error is a problem with type, title, status, code and detail.")
async def problem(talk: Talk) -> None:
    """Of three kinds of errors."""
    task = await talk.start()
    wrong_turn = talk.action_of(task) | {"turn": 7}
    answers = [
        refused(await talk.post("/end", task_id="unknown"), "not_found"),
        refused(await talk.send("POST", "/end", body=b"{"), "invalid"),
        refused(await talk.send("POST", "/observation", wrong_turn), "turn_order"),
    ]
    for answer in answers:
        for name in ("type", "title", "code", "detail"):
            if not isinstance(answer.fields.get(name), str) or not answer.fields[name]:
                raise Failed(f"{answer.call} ({answer.status}): the problem's {name} is {answer.fields.get(name)!r}")
        if answer.fields.get("status") != answer.status:
            raise Failed(f"{answer.call} ({answer.status}): the problem's status is {answer.fields.get('status')!r}")


@case("errors.unknown_task", ERRORS, "A task that the server does not know is 404 not_found, for every call.")
async def unknown_task(talk: Talk) -> None:
    """Each endpoint with an id that was never given out."""
    missing = {"task_id": "no-such-task"}
    action = missing | {"turn": 0, "message": talk.plan.action()}
    refused(await talk.send("POST", "/observation", action), "not_found")
    refused(await talk.get("no-such-task"), "not_found")
    for path in ("/pause", "/resume", "/end"):
        refused(await talk.send("POST", path, missing), "not_found")


@case("errors.no_route", ERRORS, "A path that is no endpoint is 404.")
async def no_route(talk: Talk) -> None:
    """With a code, so that a gateway does not take the server for lost."""
    expect(await talk.send("GET", "/no-such-endpoint"), 404)


@case("errors.method", ERRORS, "A method that an endpoint does not take is 405 method_not_allowed, with Allow.")
async def methods(talk: Talk) -> None:
    """GET where POST belongs, and the other way round."""
    calls = [("GET", path, "POST") for path in ("/start", "/pause", "/resume", "/end")]
    for method, path, allowed in (*calls, ("POST", "/health", "GET"), ("DELETE", "/observation?task_id=x", "GET")):
        answer = refused(await talk.send(method, path), "method_not_allowed")
        if allowed not in answer.response.headers.get("allow", ""):
            raise Failed(f"{answer.call}: 405 without the header Allow: {allowed}")


@case("errors.media_type", ERRORS, "A body that is not sent as application/json is 415 media_type.")
async def media_type(talk: Talk) -> None:
    """Text, a form, and none at all."""
    body = codec.dumps(talk.start_body())
    for path in POSTS:
        sent = body if path == "/start" else b'{"task_id": "x"}'
        refused(await talk.send("POST", path, body=sent, headers={"Content-Type": "text/plain"}), "media_type")
    async with connect(talk) as connection:
        await connection.write(connection.head("POST", "/start", f"Content-Length: {len(body)}") + body)
        refused(talk.heard("POST", "/start", body, await connection.read()), "media_type")


@case("errors.malformed", ERRORS, "A body that is not a JSON object is 422 invalid.")
async def malformed(talk: Talk) -> None:
    """Every kind at every endpoint; the server serves on."""
    for path in POSTS:
        for what, body in _MALFORMED.items():
            _invalid(await talk.send("POST", path, body=body), what)
    await talk.health()


@case("errors.unknown_field", CALLS, "Unknown fields are refused by name.")
async def unknown_field(talk: Talk) -> None:
    """A misspelt field would otherwise be an error that nobody sees."""
    task = await talk.start()
    known: dict[str, dict[str, Any]] = {
        "/start": talk.start_body(),
        "/observation": talk.action_of(task),
        "/pause": {"task_id": task.task_id},
        "/resume": {"task_id": task.task_id},
        "/end": {"task_id": task.task_id},
    }
    for path, body in known.items():
        refused(await talk.send("POST", path, body | {"mispelt": 1}), "invalid", "mispelt")
    await talk.act(task)


@case("errors.fields", ERRORS, "A missing or wrong field is 422 invalid, with the field's name.")
async def fields(talk: Talk) -> None:
    """Each field of each body, once below or above what it may be; afterwards the task goes on."""
    task = await talk.start()
    action, named = talk.action_of(task), {"task_id": task.task_id}
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("/observation", action | {"turn": -1}, "turn"),
        ("/observation", action | {"turn": 0.5}, "turn"),
        ("/observation", action | {"message": "hello"}, "message"),
        ("/observation", action | {"message": {"content": "hello"}}, "message.role"),
        ("/observation", action | {"message": {"role": "assistant", "content": 5}}, "message.content"),
        ("/observation", {name: action[name] for name in ("task_id", "turn")}, "message"),
        ("/observation", {name: action[name] for name in ("task_id", "message")}, "turn"),
        ("/observation", {name: action[name] for name in ("turn", "message")}, "task_id"),
        ("/pause", {}, "task_id"),
        ("/pause", named | {"epoch": 0}, "epoch"),
        ("/pause", named | {"epoch": "soon"}, "epoch"),
        ("/resume", named | {"epoch": MAX_EPOCH + 1}, "epoch"),
        ("/end", {}, "task_id"),
        ("/end", named | {"reason": "a\0b"}, "reason"),
        ("/end", named | {"reason": "x" * 1025}, "reason"),
    ]
    for path, body, field in wrong:
        refused(await talk.send("POST", path, body), "invalid", field)
    refused(await talk.send("GET", "/observation"), "invalid", "task_id")
    await talk.act(task)


@case("errors.start_fields", ERRORS, "A start with a missing or wrong field is 422 invalid, with the field's name.")
async def start_fields(talk: Talk) -> None:
    """Sizes, control characters, kinds and limits."""
    wrong: list[tuple[str, Any]] = [
        *(("key", value) for value in ("", "x" * (MAX_KEY_CHARS + 1), "a\nb", "a\0b", 5)),
        *(("environment", value) for value in ("", "x" * 129, "a\0b")),
        *(("seed", value) for value in (-1, 2**63, "one")),
        *(("split", value) for value in ("x" * 65, "a\nb")),
        *(("attempt", value) for value in (-1, 2**31)),
        ("kind", "test"),
        ("task", [1]),
        *(("limits", {"idle": value}) for value in (0, -1, MAX_LIMIT_S + 1, "long")),
        ("limits", {"lunch": 60}),
    ]
    for field, value in wrong:
        refused(await talk.send("POST", "/start", talk.start_body(**{field: value})), "invalid", field)
    for field in ("environment", "key"):
        body = talk.start_body()
        del body[field]
        refused(await talk.send("POST", "/start", body), "invalid", field)


@case("errors.only_assistant", CALLS, "An action is an assistant message; another role is 422 and is not acted on.")
async def only_assistant(talk: Talk) -> None:
    """The turn is still there for the real action."""
    task = await talk.start()
    for role in ("user", "system", "tool", "robot"):
        message = {"role": role, "content": "hello"}
        refused(await talk.send("POST", "/observation", talk.action_of(task, message)), "invalid", "message.role")
    await talk.act(task)


@case("errors.depth", CALLS, "What is nested deeper than 250 levels is refused.")
async def depth(talk: Talk) -> None:
    """422 or 413, in a start and in an action; the server serves on."""
    task = await talk.start()
    deep = b"[" * _LEVELS + b"]" * _LEVELS
    start, action = codec.dumps(talk.start_body()), codec.dumps(talk.action_of(task))
    expect(await talk.send("POST", "/start", body=start[:-1] + b',"task":{"x":%b}}' % deep), (413, 422))
    spoilt = action.replace(b'"role"', b'"x":%b,"role"' % deep)
    expect(await talk.send("POST", "/observation", body=spoilt), (413, 422))
    await talk.act(task)


@case("errors.too_large", CALLS, "A body that is too large is 413 too_large, and the server serves on.")
async def too_large(talk: Talk) -> None:
    """33 MiB with a stated length, and as chunks."""
    for chunked in (False, True):
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {TOO_LARGE_BYTES}"
        async with connect(talk) as connection:
            block = b"%x\r\n%b\r\n" % (len(_BLOCK), _BLOCK) if chunked else _BLOCK
            try:
                await connection.write(connection.head("POST", "/start", "Content-Type: application/json", framing))
                for _ in range(TOO_LARGE_BYTES // len(_BLOCK)):
                    await connection.write(block)
                await connection.write(b"0\r\n\r\n" if chunked else b"")
            except ConnectionError:
                pass  # it has answered, and does not read what it does not want
            refused(talk.heard("POST", "/start", framing.encode(), await connection.read()), "too_large")
    await talk.health()


def _invalid(answer: Answer, what: str) -> None:
    try:
        expect(answer, CODES["invalid"][0], "invalid")
    except Failed as error:
        raise Failed(f"{error} for a body that is {what}") from error


CASES = (
    problem,
    unknown_task,
    no_route,
    methods,
    media_type,
    malformed,
    unknown_field,
    fields,
    start_fields,
    only_assistant,
    depth,
    too_large,
)
