"""Cases that need an optional engine: skipped with one line on a laptop, failed where TIDE_REQUIRE names the engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CASE = """
import pytest

@pytest.mark.vllm
def test_generates():
    pass
"""
# The real conftest, with the engine made present or absent.
PATCH = """
import dataclasses
ENGINES["vllm"] = dataclasses.replace(ENGINES["vllm"], is_there=lambda: {present})
"""


@pytest.fixture
def run(tree, tmp_path):
    def run_case(*, present: bool, require: str) -> subprocess.CompletedProcess[str]:
        conftest = (tree.root / "tests" / "conftest.py").read_text(encoding="utf-8")
        (tmp_path / "conftest.py").write_text(conftest + PATCH.format(present=present), encoding="utf-8")
        (tmp_path / "test_case.py").write_text(CASE, encoding="utf-8")
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = vllm: an engine\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
        environment = os.environ | {"TIDE_REQUIRE": require, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return run_case


def test_a_missing_engine_skips_and_says_how_to_get_it(run):
    done = run(present=False, require="")
    assert done.returncode == 0
    assert "vllm is missing: make setup" in done.stdout


def test_a_missing_engine_fails_where_it_is_required(run):
    done = run(present=False, require="vllm")
    assert done.returncode == 1
    assert "vllm is required by TIDE_REQUIRE and missing: make setup" in done.stdout


def test_a_present_engine_runs(run):
    done = run(present=True, require="vllm")
    assert "1 passed" in done.stdout


def test_an_unknown_engine_is_refused(run):
    done = run(present=True, require="vlllm")
    assert done.returncode != 0
    assert "TIDE_REQUIRE names ['vlllm']" in done.stdout + done.stderr
