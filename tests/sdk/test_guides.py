"""Every block of the guides does what the guide says, from the first line to the last."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from counting_model import counting_model
from guide import GuideFailed, blocks, compare, play

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = ("ten-minutes-environment.md", "ten-minutes-agent.md")
PAGES = ("environments-from-elsewhere.md", "router.md", "sdk.md")


@pytest.mark.parametrize("name", GUIDES)
def test_a_reader_who_types_everything_gets_what_the_guide_shows(name, tmp_path):
    with counting_model() as model_port:
        ports = {"127.0.0.1:8000": f"127.0.0.1:{model_port}"}
        ports |= {word: str(free_port()) for word in ("8100", "8080")}
        assert play(DOCS / name, tmp_path, ports, str(Path(sys.executable).parent)) >= 4


@pytest.mark.parametrize("name", PAGES)
def test_the_programs_of_a_page_run_as_modules(name, tmp_path):
    programs = [block.text for block in blocks((DOCS / name).read_text(encoding="utf-8")) if block.kind == "python"]
    assert programs
    # One after the other in one process: they define and wrap; what stands under `__main__` wants servers.
    for number, program in enumerate(programs):
        (tmp_path / f"block{number}.py").write_text(program, encoding="utf-8")
    imports = "; ".join(f"import block{number}" for number in range(len(programs)))
    done = subprocess.run([sys.executable, "-c", imports], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```sh\nfalse\n```\n", "exit code 1"),
        ("```sh\necho yes\n```\n\n```text\nno\n```\n", "the document says"),
        ("```python\nraise ValueError\n```\n", "ValueError"),
        ("```\nls\n```\n", "nobody can run"),
    ],
)
def test_a_block_that_does_something_else_is_found(tmp_path, text, words):
    document = tmp_path / "guide.md"
    document.write_text(text)
    with pytest.raises(GuideFailed, match=words):
        play(document, tmp_path, {}, str(Path(sys.executable).parent))


def test_dots_stand_for_what_differs_from_run_to_run():
    compare("started as 17\nlog\nlog\nend\n", "started as ...\n...\nend\n", "here")
    with pytest.raises(GuideFailed):
        compare("started as 17\nlog\n", "started as ...\n...\nend\n", "here")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
