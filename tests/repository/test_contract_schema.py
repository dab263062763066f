"""The published schema is the one of `tide_sdk.wire`, and its examples are bodies that both take."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import jsonschema
import pytest
from pydantic import ValidationError

from tide_sdk import wire


@pytest.fixture(scope="module")
def schema(tree) -> dict:
    return json.loads((tree.root / "docs" / "contract.schema.json").read_text(encoding="utf-8"))


def test_the_published_schema_is_what_the_wire_models_say(tree):
    script = tree.root / "scripts" / "contract_schema.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True).stdout
    recorded = (tree.root / "docs" / "contract.schema.json").read_text(encoding="utf-8")
    assert recorded == printed, "the wire contract changed: run `make contract-schema` and read its diff"


def test_the_schema_is_valid_and_leads_to_every_body(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    reached = {call[kind]["$ref"] for call in schema["calls"] for kind in ("request", "answer") if call[kind]}
    bodies = {name for name in schema["$defs"] if name.endswith(("Request", "Response"))}
    assert reached == {f"#/$defs/{name}" for name in bodies}


def test_every_body_has_an_example_that_the_models_and_the_schema_take(schema):
    for name in [name for name in schema["$defs"] if name.endswith(("Request", "Response")) or name == "Problem"]:
        assert schema["$defs"][name]["examples"], name
        for example in schema["$defs"][name]["examples"]:
            jsonschema.validate(example, schema | {"$ref": f"#/$defs/{name}"})
            if hasattr(wire, name):
                getattr(wire, name).model_validate_json(json.dumps(example), strict=True)


def test_what_is_said_in_the_contracts_page_is_as_the_schema_has_it(tree, schema):
    page = (tree.root / "docs" / "contract.md").read_text(encoding="utf-8")
    clock = {"limit_s": 150.0, "consumed_s": 0.2, "remaining_s": 149.8}
    names = schema["$defs"]["ClockName"]["enum"]
    page = page.replace(":CLOCKS", ":" + json.dumps(dict.fromkeys(names, clock)))
    page = page.replace(":LIMITS", ":" + json.dumps(dict.fromkeys(names, 150.0)))
    calls = {call["call"]: call for call in schema["calls"]}
    said = re.findall(r"^(GET|POST) (/\S+?)(=\S+)?(?: +({.*}))?\n(\d{3}) +({.*})$", page, re.MULTILINE)
    assert len(said) >= 8
    for method, path, value, asked, status, answered in said:
        call = calls[f"{method} {path}" + ("=" if value else "")]
        if asked:
            jsonschema.validate(json.loads(asked), schema | call["request"])
        good = int(status) == call["status"]
        jsonschema.validate(json.loads(answered), schema | (call["answer"] if good else {"$ref": "#/$defs/Problem"}))
        assert good or schema["codes"][json.loads(answered)["code"]]["status"] == int(status)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("StartRequest", {"environment": "e", "key": "k\n"}),
        ("StartRequest", {"environment": "e", "key": "k", "limits": {"lunch": 1}}),
        ("StartRequest", {"environment": "e", "key": "k", "limits": {"idle": 0}}),
        ("ObservationRequest", {"task_id": "t", "turn": 0, "message": {"role": "user", "content": "x"}}),
        ("ObservationRequest", {"task_id": "t", "turn": 2**31, "message": {"role": "assistant"}}),
        ("EpochRequest", {"task_id": "t", "epoch": 0}),
        ("EndRequest", {"task_id": "t", "why": "x"}),
    ],
)
def test_what_the_models_refuse_the_schema_refuses(schema, name, body):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, schema | {"$ref": f"#/$defs/{name}"})
    with pytest.raises(ValidationError):
        getattr(wire, name).model_validate(body)
