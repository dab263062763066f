"""The published OpenAPI document: FastAPI's of its routes, the contract's five calls, and for all of them summaries,
examples, and every error by its status.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from tide_gateway.endpoints.described import ALWAYS, CALLS, REFUSED_BEFORE, TAGS, WITH_BODY, WORDS, Described
from tide_gateway.endpoints.examples import ANSWERS, REQUESTS, problems
from tide_sdk.errors import CODES
from tide_sdk.wire import (
    CONTRACT_HEADER,
    CONTRACT_VERSION,
    IMAGES_HEADER,
    EndRequest,
    EndResponse,
    EpochRequest,
    EpochResponse,
    ObservationRequest,
    ObservationResponse,
    Problem,
    StartRequest,
    StartResponse,
    TaskId,
)

CONTRACT: tuple[tuple[str, str, type[BaseModel] | None, type[BaseModel], int], ...] = (
    ("/start", "post", StartRequest, StartResponse, 201),
    ("/observation", "post", ObservationRequest, ObservationResponse, 200),
    ("/observation", "get", None, ObservationResponse, 200),
    ("/pause", "post", EpochRequest, EpochResponse, 200),
    ("/resume", "post", EpochRequest, EpochResponse, 200),
    ("/end", "post", EndRequest, EndResponse, 200),
)
_REF = "#/components/schemas/{model}"
_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, `tide_KEYID_SECRET`, or a static token. A gateway that has none serves its own machine "
    "without.",
}
_HEADERS = {
    401: {"WWW-Authenticate": {"description": "Bearer", "schema": {"type": "string"}}},
    405: {"Allow": {"description": "The methods of this path", "schema": {"type": "string"}}},
    429: {"Retry-After": {"description": "`retry_after_s`, rounded up", "schema": {"type": "integer", "minimum": 1}}},
}
_IMAGES = {
    "name": IMAGES_HEADER,
    "in": "header",
    "required": False,
    "description": "`reference`: images come as references, each to be read once from `/blobs/{digest}`. Else inline.",
    "schema": {"type": "string"},
}
_TASK_OF_START = "$response.body#/task_id"
_LINKS = {
    "act": {
        "operationId": "post_observation",
        "requestBody": {"task_id": _TASK_OF_START, "turn": 0, "message": {"role": "assistant", "content": "go"}},
        "description": "The first action is turn 0.",
    },
    "pause": {"operationId": "post_pause", "requestBody": {"task_id": _TASK_OF_START, "epoch": 1}},
    "end": {"operationId": "post_end", "requestBody": {"task_id": _TASK_OF_START}},
    "latest": {"operationId": "get_observation", "parameters": {"task_id": _TASK_OF_START}},
    "view": {"operationId": "get_tasks_task_id", "parameters": {"task_id": _TASK_OF_START}},
    "history": {"operationId": "get_tasks_task_id_events", "parameters": {"task_id": _TASK_OF_START}},
}


def add_contract(app: FastAPI) -> None:
    """Make `app.openapi()` describe the contract beside the app's own routes."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, routes=app.routes, description=WORDS, tags=TAGS
            )
            _merge(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _merge(document: dict[str, Any]) -> None:
    document["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    models = {model for _, _, request, response, _ in CONTRACT for model in (request, response, Problem) if model}
    _, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)], ref_template=_REF
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name, schema in definitions.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own errors, which no call ends in
        schemas.pop(unused, None)
    components["examples"] = problems()
    components["securitySchemes"] = {"key": _SCHEME}
    for path, method, request, response, status in CONTRACT:
        document["paths"].setdefault(path, {})[method] = _contract_call(request, response, status)
    document["paths"]["/start"]["post"]["responses"]["201"]["links"] = _LINKS
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            _describe(method, path, call)


def _contract_call(request: type[BaseModel] | None, response: type[BaseModel], status: int) -> dict[str, Any]:
    header = {
        "name": CONTRACT_HEADER,
        "in": "header",
        "required": False,
        "description": "The version of the contract that the caller speaks.",
        "schema": {"type": "string", "enum": [str(CONTRACT_VERSION)]},
    }
    call: dict[str, Any] = {
        "tags": ["contract"],
        "parameters": [header],
        "responses": {str(status): {"description": "Success", "content": _content("application/json", response)}},
    }
    if response in (StartResponse, ObservationResponse):
        call["parameters"].append(_IMAGES)
    if request is not None:
        call["requestBody"] = {"required": True, "content": _content("application/json", request)}
    else:
        schema = TypeAdapter(TaskId).json_schema()
        call["parameters"].append({"name": "task_id", "in": "query", "required": True, "schema": schema})
    return call


def _describe(method: str, path: str, call: dict[str, Any]) -> None:
    """Summary, example of the request and the success, key, and every problem by its status."""
    described = CALLS.get((method, path), Described(f"{method.upper()} {path}"))
    name = "_".join(part.strip("{}") for part in path.split("/") if part)
    call |= {"summary": described.summary, "operationId": f"{method}_{name}"}
    if described.words:
        call["description"] = described.words
    codes = [*described.codes, *ALWAYS, *(WITH_BODY if "requestBody" in call else ())]
    if described.needs_key:
        call["security"] = [{"key": []}]
        codes.append("unauthorized")
    if (method, path) in REQUESTS:
        call["requestBody"]["content"]["application/json"]["example"] = REQUESTS[method, path]
    responses = call["responses"]
    responses.pop("422", None)  # FastAPI's form of it
    for answer in responses.values():
        for content in answer.get("content", {}).values():
            if (method, path) in ANSWERS:
                content["example"] = ANSWERS[method, path]
    responses |= _problems(codes)


def _problems(codes: Iterable[str]) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code in CODES:  # in the order of the table
        if code in codes:
            by_status.setdefault(CODES[code][0], []).append(code)
    found = {
        str(status): {"description": "; ".join(CODES[code][1] for code in names)} | _problem(names, status)
        for status, names in sorted(by_status.items())
    }
    before = {
        str(status): {"description": words} | _problem([code], status)
        for status, (code, words) in REFUSED_BEFORE.items()
    }
    return dict(sorted((found | before).items()))


def _problem(codes: list[str], status: int) -> dict[str, Any]:
    content = _content("application/problem+json", Problem)
    if status in REFUSED_BEFORE:
        words = REFUSED_BEFORE[status][1]
        title = HTTPStatus(status).phrase
        problem = {"type": f"urn:tide:problem:{codes[0]}", "title": title, "status": status, "code": codes[0]}
        content["application/problem+json"]["example"] = problem | {"detail": words}
    else:
        examples = {code: {"$ref": f"#/components/examples/{code}"} for code in codes}
        content["application/problem+json"]["examples"] = examples
    return {"content": content} | ({"headers": _HEADERS[status]} if status in _HEADERS else {})


def _content(kind: str, model: type[BaseModel]) -> dict[str, Any]:
    return {kind: {"schema": {"$ref": _REF.format(model=model.__name__)}}}
