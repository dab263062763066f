"""Engines: what is missing is installed once and nothing is started; every engine is known to CI and to pytest."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib

import pytest

# The real script, with a machine of its own: `installed` lists what is there, `calls` what apt-get was told.
MACHINE = """
source scripts/engines.sh
installed() { grep -qx "$1" "$FOLDER/installed"; }
has() { installed "$1"; }
has_compose() { installed docker-compose; }
has_postgres() { installed initdb; }
id() { echo "${USER_ID:-0}"; }
apt-cache() { return 1; }
apt-get() {
  local policy=none
  if [[ -x $POLICY ]]; then policy=$("$POLICY" >/dev/null; echo $?); fi
  echo "policy=$policy $*" >>"$FOLDER/calls"
  if [[ $* == *" install "* && -e $FOLDER/no-list && $* != *update* ]]; then return 100; fi
  if [[ $* == *" update"* ]]; then rm -f "$FOLDER/no-list"; return 0; fi
  printf '%s\\n' dockerd docker docker-compose initdb javac java >>"$FOLDER/installed"
}
main "$@"
"""


@pytest.fixture
def machine(tree, tmp_path):
    (tmp_path / "installed").write_text("")
    policy = tmp_path / "policy-rc.d"

    class Machine:
        folder, policy_file = tmp_path, policy

        def run(self, *engines: str, **variables: str) -> subprocess.CompletedProcess[str]:
            environment = os.environ | {"FOLDER": str(tmp_path), "POLICY": str(policy)} | variables
            command = ["bash", "-c", MACHINE, "engines", *engines]
            options = {"capture_output": True, "text": True, "timeout": 60}
            return subprocess.run(command, cwd=tree.root, env=environment, **options)

        def has(self, *programs: str) -> None:
            (tmp_path / "installed").write_text("".join(f"{name}\n" for name in programs))

        @property
        def calls(self) -> list[str]:
            path = tmp_path / "calls"
            return path.read_text().splitlines() if path.exists() else []

    return Machine()


def test_where_all_is_there_nothing_is_done_and_root_is_not_needed(machine):
    machine.has("dockerd", "docker", "docker-compose", "initdb", "javac", "java")
    done = machine.run(USER_ID="1000")
    assert done.returncode == 0, done.stderr
    assert "docker postgres java: installed" in done.stdout
    assert machine.calls == []


def test_what_is_missing_is_installed_while_no_service_may_start(machine):
    done = machine.run()
    assert done.returncode == 0, done.stderr
    [call] = machine.calls
    assert call.startswith("policy=101 ")
    assert call.endswith("install --no-install-recommends docker.io docker-compose postgresql default-jdk-headless")
    assert not machine.policy_file.exists()


def test_only_the_missing_parts_of_the_named_engine_are_installed(machine):
    machine.has("dockerd", "docker")
    assert machine.run("docker").returncode == 0
    [call] = machine.calls
    assert call.endswith("install --no-install-recommends docker-compose")


def test_an_old_list_of_packages_is_renewed(machine):
    (machine.folder / "no-list").touch()
    done = machine.run("postgres")
    assert done.returncode == 0, done.stderr
    assert [re.search(r" (install|update)", call)[1] for call in machine.calls] == ["install", "update", "install"]


def test_a_policy_of_the_machine_stays(machine):
    machine.policy_file.write_text("#!/bin/sh\nexit 0\n")
    machine.policy_file.chmod(0o755)
    assert machine.run().returncode == 0
    assert machine.calls[0].startswith("policy=0 ")
    assert machine.policy_file.read_text() == "#!/bin/sh\nexit 0\n"


def test_without_root_the_command_to_type_is_told(machine):
    done = machine.run("postgres", USER_ID="1000")
    assert done.returncode == 1
    assert "Run: sudo apt-get install postgresql" in done.stderr
    assert machine.calls == []


def test_an_unknown_engine_is_refused(machine):
    done = machine.run("podman")
    assert done.returncode == 1
    assert "unknown engine podman; there are: docker postgres java" in done.stderr


def test_ci_requires_every_engine_and_pytest_knows_its_marker(tree):
    [table] = [
        node.value
        for node in tree.parse(tree.root / "tests" / "conftest.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ENGINES"
    ]
    engines = {ast.literal_eval(key) for key in table.keys}
    required = re.search(r"TIDE_REQUIRE:-([a-z,]+)}", (tree.root / ".ci" / "run").read_text(encoding="utf-8"))[1]
    assert set(required.split(",")) == engines
    project = tomllib.loads((tree.root / "pyproject.toml").read_text(encoding="utf-8"))
    assert engines <= {line.split(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]}
    assert engines <= set(
        re.findall(r"^\| `([a-z]+)` \|", (tree.root / "docs" / "testing.md").read_text("utf-8"), re.M)
    )


def test_set_up_brings_the_libraries_that_engines_need(tree):
    defaults = {
        re.search(r"EXTRAS(?::-| \?= )([a-z,-]+)", (tree.root / name).read_text(encoding="utf-8"))[1]
        for name in ("Makefile", "scripts/setup.sh")
    }
    [extras] = defaults
    assert {"vllm-cpu", "docker", "postgres", "ray", "environments", "dev"} == set(extras.split(","))
