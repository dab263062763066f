"""Each line says what was worked on, as text and as JSON, and masks secrets in both."""

from __future__ import annotations

import io
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from tide_gateway.log_lines import (
    FORMATS,
    JsonFormatter,
    OnServer,
    TextFormatter,
    context_fields,
    make_handler,
    replica_name,
    request_scope,
    working_on,
)

KEY = "tide_0123abcd_" + "A" * 43


@pytest.fixture
def record() -> logging.LogRecord:
    return logging.LogRecord("tide_gateway.x", logging.WARNING, "x.py", 1, "it %s", ("broke",), None)


def in_context(request_id: bytes = b"r-1") -> None:
    working_on.set(OnServer("babyai", "babyai-0-ab"))
    replica_name.set("0a1b")
    request_scope.set({"headers": [(b"host", b"x"), (b"x-request-id", request_id)]})


async def test_a_line_of_json_has_its_context_as_fields(record):
    record.created = 0.25
    assert json.loads(JsonFormatter().format(record)) == {
        "ts": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "tide_gateway.x",
        "message": "it broke",
    }
    in_context()
    line = json.loads(JsonFormatter().format(record))
    assert line["environment"] == "babyai"
    assert (line["instance"], line["replica"], line["request_id"]) == ("babyai-0-ab", "0a1b", "r-1")
    assert "task_id" not in line


async def test_a_line_of_text_has_its_context_before_the_words(record):
    assert TextFormatter().format(record).endswith(" WARNING tide_gateway.x it broke")
    in_context()
    shown = " WARNING tide_gateway.x [instance=babyai-0-ab request_id=r-1] it broke"
    assert TextFormatter().format(record).endswith(shown)


async def test_a_callers_request_id_forges_no_line_and_shows_no_key():
    in_context(b"a]\n2026 ERROR " + f"Bearer {KEY} ".encode() + b"\xff" + b"x" * 1000)
    shown = context_fields()["request_id"]
    assert shown.startswith("a??2026 ERROR Bearer tide_0123abcd_***")
    assert len(shown) <= 128


@pytest.mark.parametrize("form", FORMATS)
def test_secrets_are_masked_in_words_and_tracebacks(form):
    logger, stream = logging.Logger("tide_gateway.x"), io.StringIO()
    logger.addHandler(make_handler(form, stream))
    try:
        raise ValueError(f"cannot use {KEY}")
    except ValueError:
        logger.exception("call with %s failed", f"Bearer {KEY}")
    written = stream.getvalue()
    assert "A" * 43 not in written
    assert written.count("tide_0123abcd_***") == 2
    if form == "json":
        assert "ValueError: cannot use tide_0123abcd_***" in json.loads(written)["exception"]


async def test_work_on_two_tasks_at_once_is_told_apart_and_threads_know_of_none(bench):
    lines: list[dict[str, str]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(context_fields() | {"message": record.getMessage()})

    logger, handler = logging.getLogger("tide_gateway"), Lines()
    logger.addHandler(handler)
    try:
        limits = {"end": 0.2}
        tasks = [(await bench.start(key, end_s=60.0, limits=limits))["task_id"] for key in ("a", "b")]
        for task_id in tasks:
            await bench.end(task_id)
    finally:
        logger.removeHandler(handler)
    told = [line for line in lines if "did not end in time" in line["message"]]
    assert [line["task_id"] for line in told] == tasks[: len(told)]
    assert told
    for line in told:
        assert f"task {line['task_id']} did not end" in line["message"]
        assert (line["environment"], line["owner"]) == ("scripted", "local")
        assert line["instance"] in line["message"]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(context_fields).result() == {}


def test_a_gateway_logs_json_with_the_task_and_the_call_that_it_was_for(gateways):
    gateway = gateways(serve=["--log-format", "json"], limits={"end": 0.3})
    with gateway.client() as client:
        body = {"environment": "scripted", "key": "a", "task": {"end_s": 60.0}}
        task_id = client.post("/start", json=body).raise_for_status().json()["task_id"]
        client.post("/end", json={"task_id": task_id}, headers={"x-request-id": "r-7"}).raise_for_status()
        replica = client.get("/healthz").json()["replica"]
    gateway.stop()
    lines = [json.loads(line) for line in gateway.log().splitlines()]
    assert {line["replica"] for line in lines if "serving on" in line["message"]} == {replica}
    [line] = [line for line in lines if "did not end in time" in line["message"]]
    assert (line["task_id"], line["request_id"], line["environment"]) == (task_id, "r-7", "scripted")
    assert line["level"] == "warning"
    assert all("task_id" not in line for line in lines if line["logger"] == "tide_gateway.serve")
