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
                "default": {"description": "Problem", "content": _content("application/problem+json", Problem)},
            },
        }
        if request is not None:
            call["requestBody"] = {"required": True, "content": _content("application/json", request)}
        else:
            call["parameters"] = [{"name": "task_id", "in": "query", "required": True, "schema": {"type": "string"}}]
        document["paths"].setdefault(path, {})[method] = call


def _content(kind: str, model: type[BaseModel]) -> dict[str, Any]:
    return {kind: {"schema": {"$ref": _REF.format(model=model.__name__)}}}
