"""The HTTP surface: OpenAI's shapes, clear errors, limits."""

from __future__ import annotations

import json

import pytest

from tide_trainer.router.openai_wire import ApiError, read_request
from tide_trainer.router.state import Limits

CHAT = "/sessions/s/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(body: bytes) -> tuple[str, str | None]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["message"]
    return error["code"], error["param"]


@pytest.fixture
def live(router):
    ids = [*router.renderer.encode("go left"), *router.renderer.stop_token_ids]
    router.engine(lambda _: ids)
    router.open()
    return router


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "code"),
    [
        ("POST", CHAT, "key-of-s-and-more", 401, "invalid_api_key"),
        ("POST", CHAT, "", 401, "invalid_api_key"),
        ("POST", "/sessions/other/v1/chat/completions", "key-of-s", 404, "session_not_found"),
        ("GET", "/sessions/other/v1/models", "key-of-s", 404, "session_not_found"),
        ("GET", CHAT, "key-of-s", 405, "method_not_allowed"),
        ("POST", "/sessions/s/v1/embeddings", "key-of-s", 404, "not_found"),
        ("POST", "/footprints", "no-key", 401, "invalid_api_key"),
    ],
)
async def test_wrong_calls_are_told(method, path, key, status, code, live):
    got, body = await live.call(method, path, {"messages": HI}, key=key)
    assert (got, error_of(body)[0]) == (status, code)
    assert live.events == []


async def test_health_and_models(live):
    status, body = await live.call("GET", "/health")
    assert (status, json.loads(body)) == (200, {"status": "ok", "sessions": 1, "held": 0, "running": 0})
    _, body = await live.call("GET", "/sessions/s/v1/models")
    (model,) = json.loads(body)["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 2000)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": HI * 5000}, "messages"),
        ({"messages": ["hi"]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "robot", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"n": 2}, "n"),
        ({"top_p": 0.9}, "top_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"tools": "hammer"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_bad_requests_name_the_field(change, param, live):
    status, body = await live.call("POST", CHAT, {"messages": HI} | change)
    assert (status, error_of(body)[1]) == (400, param)
    assert live.events == []


async def test_bodies_that_are_no_json_or_too_large(live):
    status, body = await live.call("POST", CHAT, HI)
    assert (status, error_of(body)[0]) == (400, "invalid_value")
    status, body = await live.call("POST", CHAT, {"messages": HI}, content_type="text/plain")
    assert status == 415
    live.app._limits = Limits(max_body_bytes=100)
    status, body = await live.call("POST", CHAT, {"messages": HI * 50})
    assert (status, error_of(body)[0]) == (413, "too_large")


async def test_a_template_that_refuses_is_a_400(live, renderers):
    live.calls._renderer = renderers["mistral"]
    live.control._renderer = renderers["mistral"]
    live.open("m")
    status, answer = await live.chat([{"role": "system", "content": "x"}], session="m")
    assert (status, answer["error"]["code"]) == (400, "template_refused")
    assert "Only user and assistant" in answer["error"]["message"]


def test_neutral_and_unknown_fields_are_tolerated():
    request = read_request(
        {
            "messages": [{"role": "user", "content": "x", "name": None, "refusal": None, "weight": 1, "strange": []}],
            "n": 1,
            "top_p": 1.0,
            "seed": 7,
            "user": "me",
            "store": False,
            "frequency_penalty": 0.0,
            "tools": [],
            "stop": None,
        }
    )
    assert request.messages == [{"role": "user", "content": "x", "weight": 1, "strange": []}]
    assert request.ignored == ("seed",)
    assert request.tools is None
    with pytest.raises(ApiError, match="leave it out or use 1"):
        read_request({"messages": HI, "n": 3})


async def test_logprobs_are_those_of_the_sampled_ids(live):
    status, answer = await live.chat(HI, logprobs=True)
    assert status == 200
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == "go left<|im_end|>"
    assert {item["logprob"] for item in content} == {-0.25}
