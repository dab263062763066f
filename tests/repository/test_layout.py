"""Where things are: source roots, no shadowing packages, one place that reads the environment."""

from __future__ import annotations

import ast
import configparser
import tomllib

# Packages that may not be importable as plain folders of the checkout: they would shadow an installed library.
TOP_FOLDERS = (
    "gateway",
    "sdk",
    "trainer",
    "environments",
    "docker",
    "alembic",
    "benchmarks",
    "docs",
    "tests",
    "examples",
    "scripts",
)

# Files besides settings.py that may touch the process environment, each with the reason.
READS_ENVIRONMENT = {
    "gateway/tide_gateway/runtimes/ray_actor.py": "runs on a node of the cluster, whose variables its server inherits",
    "sdk/tide_sdk/check/launched.py": "the server that it starts inherits the environment, with a port added",
    "sdk/tide_sdk/mcp_environment.py": "an MCP server gets the variables that its options name, and no others",
    "sdk/tide_sdk/mcp_guard.py": "it hands on only those of its variables that are declared",
    "sdk/tide_sdk/serve.py": "the SDK has no settings; the gateway tells the server it starts to end with its parent",
    "trainer/tide_trainer/cluster/local.py": "child processes inherit the environment, with the run's cookie added",
}


def test_no_top_level_folder_is_a_package(tree):
    packages = [folder for folder in TOP_FOLDERS if (tree.root / folder / "__init__.py").exists()]
    assert packages == [], "an __init__.py there shadows or misplaces a package: remove it"


def test_each_source_root_holds_exactly_its_package(tree):
    for folder, package in tree.source_roots.items():
        holds = {p.relative_to(tree.root / folder).parts[0] for p in tree.files if p.is_relative_to(tree.root / folder)}
        assert holds == {package}, f"{folder}/ may hold {package} only"
        assert (tree.root / folder / package / "__init__.py").is_file()
        assert (tree.root / folder / package / "py.typed").is_file()


def test_every_source_package_has_an_init(tree):
    folders = {path.parent for path in tree.under(*tree.source_roots)}
    missing = sorted(tree.name(folder) for folder in folders if not (folder / "__init__.py").is_file())
    assert missing == []


def test_test_folders_are_not_packages_and_file_names_are_unique(tree):
    tests = [path for path in tree.under("tests") if path.name != "conftest.py"]
    assert [tree.name(path) for path in tests if path.name == "__init__.py"] == []
    seen: dict[str, str] = {}
    for path in tests:
        assert path.name not in seen, f"{tree.name(path)} has the name of {seen[path.name]}"
        seen[path.name] = tree.name(path)


def test_alembic_finds_its_scripts_from_any_folder(tree):
    ini = configparser.RawConfigParser()
    ini.read(tree.root / "alembic.ini", encoding="utf-8")
    locations = {
        section: ini[section].get("script_location") for section in ini.sections() if "script_location" in ini[section]
    }
    assert locations, "alembic.ini names no script_location"
    assert set(locations.values()) == {"%(here)s/alembic"}


def test_wheel_lists_every_source_root(tree):
    project = tomllib.loads((tree.root / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == sorted(f"{folder}/{package}" for folder, package in tree.source_roots.items())


def test_only_settings_read_the_environment(tree):
    found = {
        tree.name(path)
        for path in tree.under(*tree.source_roots)
        if path.name != "settings.py" and _touches_environment(tree.parse(path))
    }
    assert found - READS_ENVIRONMENT.keys() == set(), "read the environment in settings.py and hand the value in"
    assert READS_ENVIRONMENT.keys() - found == set(), "take what no longer reads the environment off the list"


def _touches_environment(module: ast.Module) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
            return True
    return False
