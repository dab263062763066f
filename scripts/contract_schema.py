"""Writes docs/contract.schema.json, the JSON Schema of the wire contract, from `tide_sdk.wire` and its docstrings.

python scripts/contract_schema.py            print it
python scripts/contract_schema.py --write    rewrite docs/contract.schema.json
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from contract_words import CALLS, EXAMPLES, FIELDS, HEAD, PROBLEM_FIELDS
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tide_sdk import wire
from tide_sdk.errors import CODES

TARGET = Path(__file__).parents[1] / "docs" / "contract.schema.json"
MODELS: tuple[type[BaseModel], ...] = (
    wire.StartRequest,
    wire.StartResponse,
    wire.ObservationRequest,
    wire.ObservationResponse,
    wire.EpochRequest,
    wire.EpochResponse,
    wire.EndRequest,
    wire.EndResponse,
    wire.HealthResponse,
    wire.HeartbeatRequest,
    wire.HeartbeatResponse,
    wire.CapacityView,
    wire.Problem,
)
_NONE_OF = re.compile(r"\^\[\^([^\]]+)\]\*\$")
_FIELD = re.compile(r"^(\w+): (.*)$")


def schema() -> dict[str, Any]:
    """The whole document."""
    _, found = models_json_schema([(model, "validation") for model in MODELS], ref_template="#/$defs/{model}")
    definitions: dict[str, Any] = _plain(found["$defs"])
    for name, definition in definitions.items():
        _describe(name, definition)
    definitions["CapacityResponse"] = {
        "description": "`GET /capacity` of a gateway: environments by name.",
        "type": "object",
        "additionalProperties": {"$ref": "#/$defs/CapacityView"},
    }
    _describe_problem(definitions["Problem"])
    for name, examples in EXAMPLES.items():
        definitions[name]["examples"] = list(examples)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:tide:contract:{wire.CONTRACT_VERSION}",
        "title": f"The wire contract, version {wire.CONTRACT_VERSION}",
        "description": HEAD,
        "calls": [_call(call) for call in CALLS],
        "codes": {code: {"status": status, "title": title} for code, (status, title) in CODES.items()},
        "$defs": dict(sorted(definitions.items())),
    }


def _call(call: dict[str, Any]) -> dict[str, Any]:
    bodies = {kind: {"$ref": f"#/$defs/{call[kind]}"} if call[kind] else None for kind in ("request", "answer")}
    return {"status": 200} | call | bodies


def _describe(name: str, definition: dict[str, Any]) -> None:
    """Move a docstring's words on fields to the fields; Python's words become JSON's.

    Raises:
        KeyError: a field has no words, neither there nor in `contract_words`.
    """
    whole, fields = _sections(definition.get("description", ""))
    definition["description"] = _in_json(whole)
    for field, about in definition.get("properties", {}).items():
        words = FIELDS.get(f"{name}.{field}") or fields.get(field) or _inherited(name, field)
        if words is None:
            raise KeyError(f"{name}.{field} has no words: add them to contract_words.FIELDS")
        about["description"] = _in_json(words)


def _plain(data: Any) -> Any:
    """As validators of all languages read it, and the same with every pydantic.

    Without titles that are the names again, and without saying that more is allowed.
    """
    if isinstance(data, list):
        return [_plain(value) for value in data]
    if not isinstance(data, dict):
        return data
    kept = {name: _plain(value) for name, value in data.items() if (name, value) != ("additionalProperties", True)}
    pattern = kept.get("pattern")
    if isinstance(pattern, str) and (found := _NONE_OF.fullmatch(pattern)) is not None:
        # In some languages `$` stands before a last line break too; what may not occur is the same in all.
        del kept["pattern"]
        kept["not"] = {"pattern": f"[{found[1]}]"}
    return {name: value for name, value in kept.items() if name != "title" or not isinstance(value, str)}


def _inherited(name: str, field: str) -> str | None:
    """A base class's words, as Action's fields are Message's."""
    model = getattr(wire, name)
    bases = [_sections(inspect.getdoc(base) or "")[1] for base in model.__mro__[1:] if issubclass(base, BaseModel)]
    return next((fields[field] for fields in bases if field in fields), None)


def _sections(docstring: str) -> tuple[str, dict[str, str]]:
    """What a Google docstring says of the whole, and of each attribute."""
    whole, _, attributes = docstring.partition("\n\nAttributes:\n")
    fields: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(attributes).splitlines():
        found = _FIELD.match(line)
        if found is not None:
            name, fields[found[1]] = found[1], found[2]
        elif name:
            fields[name] += f" {line.strip()}"
    return " ".join(whole.split()), fields


def _in_json(words: str) -> str:
    return re.sub(r"\bNone\b", "null", words)


def _describe_problem(problem: dict[str, Any]) -> None:
    properties = problem["properties"]
    properties["code"]["enum"] = list(CODES)
    for name, (kind, words) in PROBLEM_FIELDS.items():
        properties[name] = {"type": kind, "description": words}


def render() -> str:
    """The file's text; each example on one line, or they would be most of it."""
    document = schema()
    lines: dict[str, str] = {}
    for name, definition in document["$defs"].items():
        for number, example in enumerate(definition.get("examples", ())):
            mark = f"{name}.examples.{number}"
            lines[mark] = json.dumps(example, ensure_ascii=False)
            definition["examples"][number] = mark
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    for mark, line in lines.items():
        text = text.replace(f'"{mark}"', line)
    return text


def main() -> None:
    """Prints or writes the schema."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite docs/contract.schema.json")
    if parser.parse_args().write:
        TARGET.write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())


if __name__ == "__main__":
    main()
