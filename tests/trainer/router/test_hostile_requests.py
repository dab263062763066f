"""Requests that no honest client sends: each is told what is wrong with it, and no other session waits for it."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from router_apps import Router

from tide_trainer.router.calls import MAX_PLANNED_BYTES
from tide_trainer.router.openai_requests import MAX_STOP_CHARS, read_chat
from tide_trainer.router.sessions import MAX_TOKEN_CHARS

CHAT = "/sessions/s/v1/chat/completions"
RAW = "/sessions/s/v1/completions"
HI = [{"role": "user", "content": "hi"}]
DEEP = b"[" * 1000 + b"]" * 1000


@pytest.fixture
def live(router):
    ids = [*router.renderer.encode("go left"), *router.renderer.stop_token_ids]
    router.engine(lambda _: ids)
    router.open()
    return router


async def error(live, path, body, status=400):
    got, answer = await live.call("POST", path, body)
    assert got == status, answer
    assert live.events == []
    return json.loads(answer)["error"]


@pytest.mark.parametrize("role", [[], {}, [["user"]], {"user": 1}, 1, True, "\x00"])
async def test_a_role_of_any_type_is_refused_by_name(role, live):
    told = await error(live, CHAT, {"messages": [*HI, {"role": role, "content": "x"}]})
    assert told["param"] == "messages[1].role"


@pytest.mark.parametrize("path", [CHAT, RAW])
@pytest.mark.parametrize("name", ["n", "top_p", "logit_bias", "response_format", "guided_json"])
async def test_a_field_deeper_than_python_shows_is_refused_by_name(name, path, live):
    body = b'{"messages":[{"role":"user","content":"x"}],"prompt":"x","' + name.encode() + b'":' + DEEP + b"}"
    assert (await error(live, path, body))["param"] == name


@pytest.mark.parametrize("token_id", [2**31, 2**32, 2**63, 2**64 - 1])
async def test_a_token_id_beyond_the_tokenizer_s_type_is_refused(token_id, live):
    assert (await error(live, RAW, {"prompt": [1, token_id]}))["code"] == "template_refused"


async def test_ignored_fields_with_long_names_do_not_fill_the_headers():
    request = read_chat({"messages": HI, "seed": 1} | {f"k{i}" + "x" * 100_000: 1 for i in range(9)})
    assert request.ignored == ("seed",)


async def test_long_stop_texts_are_refused_before_they_are_encoded(live):
    assert (await error(live, CHAT, {"messages": HI, "stop": ["x" * (MAX_STOP_CHARS + 1)]}))["param"] == "stop"
    status, _ = await live.chat(HI, stop=["x" * MAX_STOP_CHARS])
    assert status == 200


def notes_encoding(router: Router, monkeypatch) -> list[tuple[int, bool]]:
    """Length of each text that is encoded, and whether the event loop waited for it."""
    noted: list[tuple[int, bool]] = []
    for name in ("encode", "encode_after"):
        plain = getattr(router.renderer, name)

        def noting(text, plain=plain):
            noted.append((len(text), threading.current_thread() is threading.main_thread()))
            return plain(text)

        monkeypatch.setattr(router.renderer, name, noting)
    return noted


@pytest.mark.parametrize("path", [CHAT, RAW])
async def test_what_cannot_fit_is_refused_before_it_is_encoded(path, live, monkeypatch):
    noted = notes_encoding(live, monkeypatch)
    text = "x" * (2000 * MAX_TOKEN_CHARS)
    messages = [{"role": "user", "content": text + "x"}]
    told = await error(live, path, {"messages": messages} if path == CHAT else {"prompt": text + "x"})
    assert told["code"] == "context_length_exceeded"
    ids = [1] * 2001
    assert (await error(live, RAW, {"prompt": ids}))["code"] == "context_length_exceeded"
    assert noted == []
    assert (await error(live, RAW, {"prompt": text}))["code"] == "context_length_exceeded"
    assert [length for length, _ in noted] == [len(text)]


async def test_a_long_prompt_is_encoded_beside_the_event_loop(live, monkeypatch):
    live.open("long", max_context_tokens=200_000)
    noted = notes_encoding(live, monkeypatch)
    text = "go left " * (MAX_PLANNED_BYTES // 8)
    both = await asyncio.gather(
        live.chat([{"role": "user", "content": text}], session="long"), live.chat(HI)
    )  # fmt: skip
    assert [status for status, _ in both] == [200, 200]
    assert {beside for length, beside in noted if length > len(text)} == {False}
    assert {beside for length, beside in noted if length < len(text)} == {True}


FIRST, AGAIN = {"x_stainless_retry_count": "0"}, {"x_stainless_retry_count": "1"}


async def test_a_retry_finds_its_answer_though_other_calls_were_answered_since(live):
    asked = [[{"role": "user", "content": text}] for text in ("go", "left", "right", "yes")]
    answers = await asyncio.gather(*(live.chat(messages, headers=FIRST) for messages in asked))
    for messages, (_, answer) in zip(asked, answers, strict=True):
        status, again = await live.chat(messages, headers=AGAIN)
        assert (status, again["id"]) == (200, answer["id"])
    assert live.control.close({"session": "s"})["num_calls"] == len(asked)


async def test_an_answer_that_never_arrived_is_given_again_whatever_was_answered_since(live):
    left = asyncio.Event()
    said = live.engines["r0"].say([])

    def leaving(_):
        left.set()
        return said

    live.engines["r0"].say = leaving
    assert await live.chat(HI, gone=left, headers=FIRST) == (None, None), "the client left as it was answered"
    assert (await live.chat([{"role": "user", "content": "other"}], headers=FIRST))[1]["id"] == "chatcmpl-2"
    assert (await live.chat(HI, headers=FIRST))[1]["id"] == "chatcmpl-1"
    assert (await live.chat(HI, headers=FIRST))[1]["id"] == "chatcmpl-3", "it arrived; this is another call"


async def test_a_client_that_does_not_count_asks_anew_after_another_answer(live):
    for text in ("go", "left", "go"):
        await live.chat([{"role": "user", "content": text}])
    assert live.control.close({"session": "s"})["num_calls"] == 3
