"""What `/openapi.json` and `/docs` say of the gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis

from tide_gateway.app import GatewayApp
from tide_gateway.auth import Owners
from tide_gateway.endpoints.described import CALLS
from tide_gateway.endpoints.page import page
from tide_gateway.roles import Caller
from tide_sdk.errors import CODES


@pytest.fixture(scope="module")
def document(gateway) -> dict[str, Any]:
    with gateway.client() as client:
        return client.get("/openapi.json").json()


def calls_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            yield method, path, call


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for(schema | {"components": document["components"]}, validate_formats=True)


def test_the_document_is_openapi(document):
    assert document["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(document).validate()


def test_every_call_has_words_a_summary_tags_and_the_key_that_it_needs(document):
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    tags = {tag["name"] for tag in document["tags"]}
    for method, path, call in calls_of(document):
        described = CALLS[method, path]
        assert (call["summary"], len(call["description"]) > 20) == (described.summary, True), path
        assert set(call["tags"]) <= tags, path
        assert ("security" in call) is (path not in ("/healthz", "/readyz")), path
    names = [call["operationId"] for _, _, call in calls_of(document)]
    assert len(names) == len(set(names))


def test_every_request_and_success_has_an_example_of_its_schema(document):
    num_examples = 0
    for method, path, call in calls_of(document):
        (success,) = [answer for status, answer in call["responses"].items() if status.startswith("2")]
        for holder in (call.get("requestBody"), success):
            for content in holder["content"].values() if holder else ():
                assert "example" in content, (method, path)
                validator(document, content.get("schema", {})).validate(content["example"])
                num_examples += 1
    assert num_examples >= 27


def test_every_error_has_an_example_of_its_status(document):
    seen: set[str] = set()
    for _, path, call in calls_of(document):
        errors = {status: answer for status, answer in call["responses"].items() if not status.startswith("2")}
        assert {"403", "405", "429", "500", "503"} <= errors.keys()
        assert ("401" in errors) is ("security" in call)
        assert ({"413", "415", "422"} <= errors.keys()) or "requestBody" not in call
        for status, answer in errors.items():
            ((kind, content),) = answer["content"].items()
            assert kind == "application/problem+json"
            found = [document["components"]["examples"][name]["value"] for name in content.get("examples", ())]
            for example in found or [content["example"]]:
                validator(document, content["schema"]).validate(example)
                assert (str(example["status"]), example["code"] in CODES) == (status, True), path
                seen.add(example["code"])
    assert seen == CODES.keys()


def test_links_lead_from_a_start_to_the_calls_on_its_task(document):
    names = {call["operationId"] for _, _, call in calls_of(document)}
    links = document["paths"]["/start"]["post"]["responses"]["201"]["links"]
    assert len(links) >= 6
    assert {link["operationId"] for link in links.values()} <= names


def test_the_page_shows_every_call_and_takes_nothing_from_elsewhere(document):
    html = page(document)
    for method, path, call in calls_of(document):
        assert f"<code>{method.upper()} {path}</code> {call['summary']}" in html.replace("&#x27;", "'")
    assert "<script" not in html
    assert re.findall(r"(?:src|href)=[\"']?(?!/openapi\.json)", html) == []


async def ask(app: GatewayApp, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b"task_id=t"}
    await app(scope | {"raw_path": path.encode(), "root_path": "", "http_version": "1.1"}, None, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("path", ["/observation", "/tasks", "/capacity"])
async def test_two_authorization_headers_are_refused_wherever_they_come(bench, path):
    """A proxy that checked one of them may have meant the other."""
    app = GatewayApp(bench.service, Owners({"a" * 16: Caller("ann", "agent"), "b" * 16: Caller("bob", "agent")}))
    one, two = ((b"authorization", b"Bearer " + letter * 16) for letter in (b"a", b"b"))
    assert (await ask(app, path, [one]))[0] in (200, 404)
    for headers in ([one, two], [two, one], [one, one]):
        status, problem = await ask(app, path, headers)
        assert (status, problem["code"]) == (401, "unauthorized")
        assert "once" in problem["detail"]
