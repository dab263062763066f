"""Adds the contract's five endpoints, which FastAPI does not route, to the published OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tide_sdk.wire import (
    EndRequest,
    EndResponse,
    EpochRequest,
    EpochResponse,
    ObservationRequest,
    ObservationResponse,
    Problem,
    StartRequest,
    StartResponse,
)

CALLS: tuple[tuple[str, str, type[BaseModel] | None, type[BaseModel], int], ...] = (
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
_REFUSALS = {"401": "The key is missing, unknown, revoked or expired", "403": "The key's role does not allow this call"}
_OPEN = ("/healthz", "/readyz")
"""Paths that need no key."""


def add_contract(app: FastAPI) -> None:
    """Make `app.openapi()` describe the contract beside the app's own routes."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _merge(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _merge(document: dict[str, Any]) -> None:
    models = {model for _, _, request, response, _ in CALLS for model in (request, response, Problem) if model}
    _, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)], ref_template=_REF
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in definitions.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    for path, method, request, response, status in CALLS:
        call: dict[str, Any] = {
            "tags": ["contract"],
            "summary": f"{method.upper()} {path}",
            "description": (response.__doc__ or "").strip(),
            "responses": {
                str(status): {"description": "Success", "content": _content("application/json", response)},
                "default": _PROBLEM | {"description": "Problem"},
            },
        }
        if request is not None:
            call["requestBody"] = {"required": True, "content": _content("application/json", request)}
        else:
            call["parameters"] = [{"name": "task_id", "in": "query", "required": True, "schema": {"type": "string"}}]
        document["paths"].setdefault(path, {})[method] = call
    _protect(document)


def _protect(document: dict[str, Any]) -> None:
    """Say which calls need a key, and that every refusal is problem+json, also where FastAPI says otherwise."""
    document["components"]["securitySchemes"] = {"key": _SCHEME}
    for path, calls in document["paths"].items():
        for call in calls.values():
            responses = call["responses"]
            if path not in _OPEN:
                call["security"] = [{"key": []}]
                responses |= {status: _PROBLEM | {"description": words} for status, words in _REFUSALS.items()}
            if "422" in responses:
                responses["422"] = _PROBLEM | {"description": "A field is wrong"}


def _content(kind: str, model: type[BaseModel]) -> dict[str, Any]:
    return {kind: {"schema": {"$ref": _REF.format(model=model.__name__)}}}


_PROBLEM = {"content": _content("application/problem+json", Problem)}
