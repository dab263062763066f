"""Checks of what messages may hold: every form of OpenAI's schema, any text, much of it, and images."""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, cast

from tide_sdk import codec
from tide_sdk.check.answers import expect, refused, same
from tide_sdk.check.case import Failed, Skipped, case
from tide_sdk.check.cases_http import CALLS
from tide_sdk.check.cases_turns import ONCE
from tide_sdk.check.talk import Talk, Task

LARGE_BYTES = 31 * 1024 * 1024
"""Of an action: what came to a gateway with 16 MiB may be longer when it is written anew, up to 32 MiB."""
LARGE_OBSERVATION_BYTES = 256 * 1024
ECHO = "tide-check-echo:"
TEXTS = {
    "accents": "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
    "combining marks": "cafe\N{COMBINING ACUTE ACCENT} n\N{COMBINING TILDE}\N{COMBINING DOT BELOW}",
    "right to left": "\u05e9\u05dc\u05d5\u05dd \u202b\u0645\u0631\u062d\u0628\u0627\u202c",
    "emoji": "\U0001f469\u200d\U0001f680 \U0001f1ea\U0001f1fa \U0001f44d\U0001f3fd",
    "other planes": "\U00020bb7 \U0001d11e \U0010fffd",
    "control characters": "a\u0000b\u0007c\u007fd\u0085e\u2028f\u2029g\r\n\th",
    "what is special elsewhere": "</script> \\u0041 %00 ${x} '; -- \ufeff\ufffe",
}
_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+);base64,(.*)", re.DOTALL)


@case("message.text", CALLS, "Any text reaches the environment as it was sent, and comes back so.")
async def text(talk: Talk) -> None:
    """Emoji, right to left, NUL and more: the turn is answered, and an environment that repeats words repeats these."""
    for what, words in TEXTS.items():
        task = await talk.start()
        try:
            observed = await talk.act(task, f"{ECHO}{words}:end")
        except Failed as error:
            raise Failed(f"an action with {what}: {error}") from error
        for said in _strings(observed["messages"]):
            if ECHO in said and f"{ECHO}{words}:end" not in said:
                raise Failed(f"an action with {what} came back changed: {said[:200]!r}")
        await talk.end(task)


@case("message.exact", ONCE, "Messages compare exactly: other words are a conflict, another way to escape them is not.")
async def exact(talk: Talk) -> None:
    """Texts that look alike, and the same text as UTF-8 and as escapes."""
    words = TEXTS["accents"] + TEXTS["emoji"] + TEXTS["control characters"]
    task = await talk.start()
    body = talk.action_of(task, words)
    observed = talk.took(task, await talk.send("POST", "/observation", body))
    escaped = _escaped(codec.dumps(body))
    same(expect(await talk.send("POST", "/observation", body=escaped), 200).data, observed, "the same turn, escaped")
    others = (
        unicodedata.normalize("NFD", words),
        words.replace("\U0001f469", "\U0001f468"),
        words.replace("\N{LATIN SMALL LETTER E WITH ACUTE}", "e"),
        words.replace("\0", ""),
        words + " ",
    )
    for other in others:
        message = talk.plan.action(other)
        answer = await talk.send("POST", "/observation", body | {"message": message})
        try:
            refused(answer, "turn_conflict")
        except Failed as error:
            raise Failed(f"{error}: {other!r} is taken for {words!r}") from error


@case("message.reason", "The end", "The reason of an end comes back as it was sent, in the outcome.")
async def reason(talk: Talk) -> None:
    """With accents, emoji, and a line break."""
    words = f"{TEXTS['accents']} {TEXTS['emoji']} {TEXTS['right to left']}\nline"
    account = await talk.end(await talk.start(), words)
    same(account["outcome"].get("reason"), words, "the outcome's reason and the reason that was sent")


@case(
    "message.forms",
    CALLS,
    "An action may have parts, tool calls, no content, and fields that the server does not know.",
)
async def forms(talk: Talk) -> None:
    """Each in a task of its own, so that the environment may end it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "\\u00e9"}'}}
    messages: dict[str, dict[str, Any]] = {
        "text parts": {"content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        "tool calls without content": {"content": None, "tool_calls": [call]},
        "tool calls and no content field": {"tool_calls": [call, call | {"id": "call_2"}]},
        "empty content": {"content": ""},
        "no content": {},
        "unknown fields": {"content": "hello", "reasoning_content": "because", "refusal": None, "audio": {"id": "x"}},
    }
    for what, fields in messages.items():
        task = await talk.start()
        try:
            await talk.act(task, {"role": "assistant"} | fields)
        except Failed as error:
            raise Failed(f"an action with {what}: {error}") from error
        await talk.end(task)


@case("message.surrogate", CALLS, "Half a surrogate pair, which UTF-8 cannot carry, is refused.")
async def surrogate(talk: Talk) -> None:
    """As an escape, in an action and in a key; the task goes on."""
    task = await talk.start()
    body = codec.dumps(talk.action_of(task, "HALF")).replace(b"HALF", b"half \\ud83d of it")
    refused(await talk.send("POST", "/observation", body=body), "invalid")
    spoilt = codec.dumps(talk.start_body(key="HALF")).replace(b"HALF", b"\\ude80")
    refused(await talk.send("POST", "/start", body=spoilt), "invalid")
    await talk.act(task)


@case("message.large", CALLS, "A server takes bodies of up to 32 MiB.")
async def large(talk: Talk) -> None:
    """An action of 1 MiB, with a repeat and a conflict, and one of 31 MiB."""
    task = await talk.start()
    body = talk.action_of(task, "\N{LATIN SMALL LETTER E WITH ACUTE}" * (512 * 1024))
    observed = talk.took(task, await talk.send("POST", "/observation", body))
    same(expect(await talk.send("POST", "/observation", body), 200).data, observed, "a large turn repeated")
    body["message"]["content"] += "."
    refused(await talk.send("POST", "/observation", body), "turn_conflict")
    await talk.end(task)
    await talk.act(await talk.start(), "x" * LARGE_BYTES)


@case("observation.large", CALLS, "A large observation comes whole, and the same each time.")
async def large_observation(talk: Talk) -> None:
    """Of whatever the environment shows after the actions that were named."""
    largest = max([len(codec.dumps(observed)) for observed in await _walk(talk)], default=0)
    if largest < LARGE_OBSERVATION_BYTES:
        words = "name an --action or a --task that gives a larger one"
        raise Skipped(f"the largest observation has {largest} bytes: {words}")
    talk.notes.append(f"the largest observation has {largest} bytes")


@case("observation.images", CALLS, "Images are data URLs or links in image_url parts; a data URL holds an image.")
async def images(talk: Talk) -> None:
    """Of whatever the environment shows after the actions that were named."""
    num_images = 0
    for observed in await _walk(talk):
        for part in _image_parts(observed["messages"]):
            url = cast("dict[str, Any]", part["image_url"]).get("url") if isinstance(part["image_url"], dict) else None
            if not isinstance(url, str):
                raise Failed(f"an image_url part has no url: {str(part)[:200]}")
            num_images += 1
            if url.startswith("data:"):
                _check_data_url(url)
    if not num_images:
        raise Skipped("no observation has an image: name an --action or a --task that gives one")
    talk.notes.append(f"{num_images} images")


async def _walk(talk: Talk) -> list[dict[str, Any]]:
    """The observations of a task with all actions that were named, each read twice from the record."""
    task = await talk.start()
    seen: list[dict[str, Any]] = [task.started]
    for action in (*talk.plan.actions, *talk.plan.end_actions):
        if task.done:
            break
        seen.append(await _take_twice(talk, task, action))
    await talk.end(task)
    return seen


async def _take_twice(talk: Talk, task: Task, action: Mapping[str, Any]) -> dict[str, Any]:
    body = talk.action_of(task, action)
    observed = await talk.act(task, action)
    same(expect(await talk.send("POST", "/observation", body), 200).data, observed, f"turn {body['turn']} repeated")
    shown = expect(await talk.get(task.task_id), 200).data
    same(shown["messages"], observed["messages"], "GET /observation and the turn's answer")
    return observed


def _image_parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from (part for part in message["content"] if "image_url" in part)


def _check_data_url(url: str) -> None:
    found = _DATA_URL.fullmatch(url)
    if found is None:
        raise Failed(f"a data URL is not data:image/...;base64,...: {url[:60]!r}")
    try:
        if not base64.b64decode(found[2], validate=True):
            raise Failed("a data URL holds no bytes")
    except binascii.Error as error:
        raise Failed(f"a data URL is not base64: {error}") from error


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for value in cast("dict[str, Any]", data).values():
            yield from _strings(value)
    elif isinstance(data, list):
        for value in cast("list[Any]", data):
            yield from _strings(value)


def _escaped(body: bytes) -> bytes:
    """The same JSON with every character outside ASCII as an escape."""
    units = (body.decode()[i : i + 1] for i in range(len(body.decode())))
    return b"".join(
        unit.encode() if unit.isascii() else b"".join(b"\\u%04x" % word for word in _utf16(unit)) for unit in units
    )


def _utf16(character: str) -> Iterator[int]:
    data = character.encode("utf-16-be")
    return (int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2))


CASES = (text, exact, reason, forms, surrogate, large, large_observation, images)
