"""The environment files that people copy are right: the examples, what is commented out there, and the documents."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tide_gateway.settings import load_settings, parse_environments
from tide_gateway.specs import DockerOptions, EnvironmentSpec, ProcessOptions, RayOptions, RemoteOptions

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = (
    "docs/environments-toml.md",
    "docker/README.md",
    "environments/tide_environments/codebreaker/README.md",
    "environments/tide_environments/bisection/README.md",
)


@pytest.mark.parametrize("name", ["examples/environments.toml", "docker/environments.toml"])
def test_the_files_of_the_tree_are_accepted(name):
    assert load_settings(ROOT / name, {}).environments


def test_what_is_commented_out_in_the_example_is_accepted():
    lines = (ROOT / "examples/environments.toml").read_text(encoding="utf-8").splitlines()
    commented = [line.removeprefix("# ") for line in lines if re.match(r"# (\[|\w+ = )", line)]
    specs = parse_environments(tomllib.loads("\n".join(commented)))
    assert [spec.runtime for spec in specs.values()] == ["docker", "remote"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_blocks_of_the_documents_are_accepted(name):
    blocks = BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        assert parse_environments(tomllib.loads(block))


def test_every_field_is_documented():
    text = (ROOT / "docs/environments-toml.md").read_text(encoding="utf-8")
    options = (EnvironmentSpec, ProcessOptions, DockerOptions, RemoteOptions, RayOptions)
    fields = {field for model in options for field in model.model_fields} - {"name"}
    assert sorted(field for field in fields if f"`{field}`" not in text and f".{field}]" not in text) == []
