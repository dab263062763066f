"""Whatever the OpenAPI document allows or forbids, the gateway answers as it says, and never with a fault of its own.

`make soak-api` is the same with thousands of cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from api_fuzz import TOKENS, fuzz
from fresh_databases import FreshDatabases, kind_params
from scripted_gateway import start_gateway

# One form each: examples, what the schemas' edges are, random bodies, and chains of calls on one task.
OPTIONS = ["--generation-deterministic", "--max-examples", "8", "--phases", "examples,coverage,fuzzing,stateful"]


@pytest.mark.parametrize("kind", kind_params())
def test_no_call_of_the_document_is_answered_outside_of_it(kind, fresh_databases: FreshDatabases, tmp_path: Path):
    with fresh_databases.fresh(kind) as url:
        gateway = start_gateway(tmp_path, url, TOKENS)
        try:
            found = fuzz(gateway.url, tmp_path, OPTIONS, limit_s=100)
            assert gateway.running
        finally:
            code = gateway.stop()
    assert found.failures == [], found.words
    assert (set(found.phases.values()), found.tested > 15) == ({"success"}, True), found.words
    assert found.num_cases > 500
    assert code == 0
    assert "Traceback" not in gateway.text()
