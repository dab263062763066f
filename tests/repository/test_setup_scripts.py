"""Set-up: what is unmet is found, and what cannot work is refused with a message that tells the fix."""

from __future__ import annotations

import importlib.util
import os
import subprocess

import pytest
from packaging.requirements import Requirement


@pytest.fixture
def unmet(tree):
    spec = importlib.util.spec_from_file_location("unmet_requirements", tree.root / "scripts" / "unmet_requirements.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def declare(monkeypatch):
    def set_lines(*lines: str) -> None:
        monkeypatch.setattr("importlib.metadata.requires", lambda name: list(lines))

    return set_lines


def test_an_extra_of_our_own_is_resolved_to_what_it_names(unmet, declare):
    declare(
        "httpx>=0.27",
        "torch; extra == 'train'",
        "tiderl[gateway]; extra == 'train'",
        "sqlalchemy[asyncio]>=2; extra == 'gateway'",
        "ray; extra == 'ray'",
    )
    assert {r.name for r in unmet.direct_requirements({"train"})} == {"httpx", "torch", "sqlalchemy"}


def test_a_requirement_for_another_python_is_left_out(unmet, declare):
    declare("httpx; python_version < '3'", "torch; python_version < '3' and extra == 'train'")
    assert unmet.direct_requirements({"train"}) == []


@pytest.mark.parametrize(
    ("line", "met"), [("pytest>=8", True), ("pytest<1", False), ("no-such-distribution-at-all", False)]
)
def test_a_requirement_is_met_by_an_installed_version_that_fits(unmet, line, met):
    assert unmet.is_met(Requirement(line)) is met


def test_an_unknown_extra_is_refused_by_name(unmet):
    with pytest.raises(SystemExit, match=r"bogus.*vllm-cpu"):
        unmet.named_extras("dev,bogus")


@pytest.fixture
def run_setup(tree, tmp_path):
    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"VENV": str(tmp_path / "venv")} | variables
        command = [str(tree.root / "scripts" / "setup.sh")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_an_unfit_python_is_refused_with_what_fits(run_setup):
    done = run_setup(PYTHON="/bin/false")
    assert done.returncode != 0
    assert "PYTHON=/bin/false is not a Python from 3.11" in done.stderr


def test_a_machine_without_a_fit_python_is_told_what_to_install(run_setup, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "flock", "env"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    done = run_setup(PATH=str(programs), PYTHON="")
    assert done.returncode != 0
    assert "TideRL needs Python 3.11 or newer" in done.stderr
    assert "python3-venv" in done.stderr
