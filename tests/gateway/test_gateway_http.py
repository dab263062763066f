"""The contract over real HTTP and a real environment server process."""

from __future__ import annotations

import json
import secrets
import time

import httpx
import pytest

from tide_sdk.errors import CODES
from tide_sdk.wire import EndResponse, EpochResponse, ObservationResponse, Problem, StartResponse, TaskView

GO = {"role": "assistant", "content": "go"}


@pytest.fixture(scope="module")
def client(gateway):
    with gateway.client() as client:
        yield client


def start(client: httpx.Client, key: str | None = None, **script) -> str:
    limits = script.pop("limits", None)
    body = {"environment": "scripted", "key": key or secrets.token_hex(8), "task": script}
    answer = client.post("/start", json=body | ({"limits": limits} if limits else {}))
    assert answer.status_code == 201, answer.text
    return StartResponse.model_validate_json(answer.content).task_id


def problem(answer: httpx.Response, status: int, code: str) -> dict:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert answer.headers["tide-contract"] == "1"
    body = Problem.model_validate_json(answer.content).model_dump()
    assert (body["code"], body["status"], CODES[code][0]) == (code, status, status)
    return body


def test_a_whole_task(client):
    task_id = start(client, turns=2, reward=0.5)
    first = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO})
    assert first.headers["tide-contract"] == "1"
    assert ObservationResponse.model_validate_json(first.content).turn == 1
    latest = client.get("/observation", params={"task_id": task_id})
    assert latest.json()["messages"] == first.json()["messages"]
    paused = client.post("/pause", json={"task_id": task_id, "epoch": 1})
    assert EpochResponse.model_validate_json(paused.content).state == "paused"
    problem(client.post("/observation", json={"task_id": task_id, "turn": 1, "message": GO}), 423, "paused")
    assert client.post("/resume", json={"task_id": task_id}).json()["state"] == "waiting"
    last = client.post("/observation", json={"task_id": task_id, "turn": 1, "message": GO})
    assert last.json()["terminated"] is True
    account = EndResponse.model_validate_json(client.post("/end", json={"task_id": task_id}).content)
    assert (account.reward, account.turns, account.outcome.kind) == (0.5, 2, "completed")
    assert TaskView.model_validate_json(client.get(f"/tasks/{task_id}").content).state == "ended"
    kinds = [event["kind"] for event in client.get(f"/tasks/{task_id}/events").json()]
    assert kinds == ["starting", "started", "paused", "waiting", "done", "released", "ended"]


def test_messages_pass_through_as_they_are(client):
    task_id = start(client)
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "go", "arguments": '{"n":1}'}}],
        "reasoning_content": "é \u2028 \U0001f600",
    }
    answer = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": message})
    assert answer.status_code == 200
    again = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": message})
    assert again.json()["info"] == {"effects": 1}
    other = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": message | {"content": ""}})
    problem(other, 409, "turn_conflict")


DEEP: list = []
for _ in range(70):
    DEEP = [DEEP]
BAD = [
    ("/start", {"key": "k"}, "environment"),
    ("/start", {"environment": "scripted", "key": ""}, "key"),
    ("/start", {"environment": "scripted", "key": "k", "sed": 1}, "sed"),
    ("/start", {"environment": "scripted", "key": "k", "seed": -1}, "seed"),
    ("/start", {"environment": "scripted", "key": "k", "attempt": True}, "attempt"),
    ("/start", {"environment": "scripted", "key": "k", "kind": "test"}, "kind"),
    ("/start", {"environment": "scripted", "key": "k", "limits": {"idle": 0}}, "limits.idle"),
    ("/start", {"environment": "scripted", "key": "k", "limits": {"idle": 1e9}}, "limits.idle"),
    ("/start", {"environment": "scripted", "key": "k", "limits": {"nap": 1}}, "limits.nap"),
    ("/observation", {"task_id": "t", "turn": 0}, "message"),
    ("/observation", {"task_id": "t", "turn": "0", "message": GO}, "turn"),
    ("/observation", {"task_id": "t", "turn": -1, "message": GO}, "turn"),
    ("/observation", {"task_id": "t", "turn": 0, "message": {"role": "robot"}}, "message.role"),
    ("/observation", {"task_id": "t", "turn": 0, "message": {"role": "user", "content": "go"}}, "message.role"),
    ("/observation", {"task_id": "t", "turn": 0, "message": GO | {"tool_calls": [{}] * 1025}}, "message.tool_calls"),
    ("/observation", {"task_id": "t", "turn": 0, "message": GO | {"content": [{}] * 1025}}, "message.content"),
    ("/start", {"environment": "scripted", "key": "a\0b"}, "key"),
    ("/start", {"environment": "scripted", "key": "k", "task": {"a": DEEP}}, "task"),
    ("/end", {"task_id": "t\n"}, "task_id"),
    ("/end", {"task_id": "t", "reason": "a\0b"}, "reason"),
    ("/observation", {"task_id": "t", "turn": 0, "message": {"role": "assistant", "content": 1}}, "message.content"),
    ("/pause", {"task_id": "t", "epoch": 0}, "epoch"),
    ("/resume", {"task_id": "t", "epoch": 2**63}, "epoch"),
    ("/resume", {"task_id": ""}, "task_id"),
    ("/end", {"task_id": "t", "reason": "x" * 2000}, "reason"),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD)
def test_a_wrong_field_is_named(client, path, body, field):
    found = problem(client.post(path, json=body), 422, "invalid")
    assert found["field"].startswith(field)
    assert field.split(".")[-1] in found["detail"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"task_id": NaN}', b"\xff", b'{"task_id":"\\ud800"}', b"[" * 5000,
     b'{"a":' * 400 + b"1" + b"}" * 400],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/start", "/observation", "/end"])
def test_what_is_not_a_json_object_is_invalid(client, path, body):
    problem(client.post(path, content=body, headers={"content-type": "application/json"}), 422, "invalid")


def test_a_message_too_deep_to_be_stored_is_refused_before_it_acts(client):
    task_id = start(client)
    deep = '{"x":' * 300 + "1" + "}" * 300
    body = f'{{"task_id":"{task_id}","turn":0,"message":{{"role":"assistant","extra":{deep}}}}}'
    answer = client.post("/observation", content=body, headers={"content-type": "application/json"})
    problem(answer, 422, "invalid")
    answer = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO})
    assert answer.json()["info"] == {"effects": 1}


def test_methods_types_sizes_paths_and_versions(client):
    found = client.get("/start")
    problem(found, 405, "method_not_allowed")
    assert found.headers["allow"] == "POST"
    problem(client.delete("/tasks"), 405, "method_not_allowed")
    problem(client.put("/observation", json={}), 405, "method_not_allowed")
    problem(client.post("/end", content=b"{}", headers={"content-type": "text/plain"}), 415, "media_type")
    problem(client.post("/end", content=b"{}"), 415, "media_type")
    big = b'{"task_id":"' + b"x" * (17 * 1024 * 1024) + b'"}'
    problem(client.post("/end", content=big, headers={"content-type": "application/json"}), 413, "too_large")
    problem(client.get("/nowhere"), 404, "not_found")
    problem(client.get("/tasks/"), 404, "not_found")
    problem(client.get("/observation"), 422, "invalid")
    problem(client.get("/tasks?limit=0"), 422, "invalid")
    problem(client.get("/tasks?state=asleep"), 422, "invalid")
    old = client.post("/end", json={"task_id": "t"}, headers={"tide-contract": "2"})
    problem(old, 422, "invalid")


def test_a_chunked_body_is_bounded_too(client):
    def chunks():
        yield b'{"task_id":"'
        for _ in range(17):
            yield b"x" * 1024 * 1024

    problem(client.post("/end", content=chunks(), headers={"content-type": "application/json"}), 413, "too_large")


def test_unknown_tasks(client):
    problem(client.post("/observation", json={"task_id": "nope", "turn": 0, "message": GO}), 404, "not_found")
    problem(client.get("/observation?task_id=nope"), 404, "not_found")
    problem(client.post("/end", json={"task_id": "nope"}), 404, "not_found")
    problem(client.get("/tasks/nope"), 404, "not_found")
    problem(client.get("/tasks/nope/events"), 404, "not_found")
    problem(client.post("/start", json={"environment": "nope", "key": "k"}), 404, "environment_unknown")


def test_sub_second_limits_hold_without_any_call(client):
    task_id = start(client, limits={"idle": 0.3})
    deadline = time.monotonic() + 10
    while client.get(f"/tasks/{task_id}").json()["state"] != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    answer = client.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO})
    assert problem(answer, 410, "expired")["clock"] == "idle"


def test_a_turn_that_hangs_is_504_and_then_410(client):
    task_id = start(client, hang_turn=0, limits={"turn": 0.3})
    body = {"task_id": task_id, "turn": 0, "message": GO}
    assert problem(client.post("/observation", json=body), 504, "turn_expired")["clock"] == "turn"
    problem(client.post("/observation", json=body), 410, "expired")
    account = client.post("/end", json={"task_id": task_id}).json()
    assert account["outcome"]["clock"] == "turn"


def test_pages_of_tasks(client):
    made = [start(client) for _ in range(5)]
    page = client.get("/tasks", params={"limit": 2, "state": "waiting"}).json()
    assert [task["task_id"] for task in page["tasks"]] == made[:-3:-1]
    following = client.get("/tasks", params={"limit": 2, "after": page["next"], "environment": "scripted"}).json()
    assert [task["task_id"] for task in following["tasks"]] == made[-3:-5:-1]
    for task_id in made:
        client.post("/end", json={"task_id": task_id})


def test_views_and_documentation(client):
    assert client.get("/healthz").json()["status"] == "ok"
    before = client.get("/capacity").json()["scripted"]
    task_id = start(client)
    after = client.get("/capacity").json()["scripted"]
    assert (after["capacity"], after["free"]) == (16, before["free"] - 1)
    (environment,) = client.get("/environments").json()
    assert (environment["name"], environment["servers"][0]["state"]) == ("scripted", "ready")
    client.post("/end", json={"task_id": task_id})
    document = client.get("/openapi.json").json()
    assert {"/start", "/observation", "/pause", "/resume", "/end", "/tasks", "/capacity"} <= document["paths"].keys()
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= document["components"]["schemas"].keys()
    assert client.get("/docs").status_code == 200


def test_no_capacity_is_429_with_retry_after(client):
    free = client.get("/capacity").json()["scripted"]["free"]
    held = [start(client) for _ in range(free)]
    answer = client.post("/start", json={"environment": "scripted", "key": "one too many"})
    problem(answer, 429, "capacity")
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    for task_id in held:
        client.post("/end", json={"task_id": task_id})
