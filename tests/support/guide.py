"""Plays a document as a reader would: its files are written, its programs and commands run, its outputs compared.

| block | what is done |
| --- | --- |
| `python`, first line `# name.py` | the file is written |
| `python` | run as a program of its own |
| `toml`, first line `# name.toml` | the file is written |
| `sh` | run by bash, in one session for the whole document; what it leaves in the background goes on until the end |
| `json` | must be JSON |
| `text` behind one that was run | what it printed; `...` stands for anything, also for whole lines |
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([\w./-]+\.(?:py|toml|jsonl))\n")
LIMIT_S = 60.0


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, its text, and the line of the document on which it begins."""

    kind: str
    text: str
    line: int


class GuideFailed(AssertionError):
    """A block does not do what the document says."""


def blocks(document: str) -> Iterator[Block]:
    """The document's blocks in order."""
    for match in BLOCK.finditer(document):
        yield Block(match[1].strip(), match[2], document.count("\n", 0, match.start()) + 1)


def play(document: Path, folder: Path, replaced: Mapping[str, str], path: str) -> int:
    """Play a document in a folder; how many blocks were run.

    Args:
        document: a Markdown file.
        folder: empty; where the reader works.
        replaced: words to replace first, such as ports.
        path: folder of the commands.

    Raises:
        GuideFailed: a block fails, prints something else, or is of no kind that can be run.
    """
    text = document.read_text(encoding="utf-8")
    for word, other in replaced.items():
        text = text.replace(word, other)
    printed: str | None = None
    num_run = 0
    with shell(folder, path) as run:
        for block in blocks(text):
            where = f"{document.name}, line {block.line}"
            named = NAMED.match(block.text) if block.kind in ("python", "toml") else None
            if named is not None:
                target = folder / named[1]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
                if block.kind == "python":
                    compile(block.text, named[1], "exec")
            elif block.kind == "python":
                (folder / "block.py").write_text(block.text, encoding="utf-8")
                printed = run(f"{sys.executable} block.py", where)
            elif block.kind == "sh":
                printed = run(block.text, where)
            elif block.kind == "json":
                json.loads(block.text)
            elif block.kind == "text" and printed is not None:
                compare(printed, block.text, where)
            elif block.kind != "text":
                raise GuideFailed(f"{where}: nobody can run a block of kind {block.kind!r}")
            num_run += block.kind in ("python", "sh")
    return num_run


def compare(printed: str, expected: str, where: str) -> None:
    """Raises GuideFailed if the output is not as the document says."""
    pattern = ".*?".join(re.escape(part) for part in re.split(r"\.\.\.", expected.strip()))
    if re.fullmatch(pattern, printed.strip(), re.DOTALL) is None:
        raise GuideFailed(f"{where}: the document says\n{expected}\nbut this was printed\n{printed}")


@contextlib.contextmanager
def shell(folder: Path, path: str):
    """One bash session; yields a function that runs commands in it and gives what they printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TIDE_", "PYTEST_"))}
    environ |= {"PATH": f"{path}:{environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        ["bash", "--noprofile", "--norc"],
        cwd=folder,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield lambda commands, where: _run(process, commands, where)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
        for stream in (process.stdin, process.stdout):
            stream.close()


def _run(process: subprocess.Popen[bytes], commands: str, where: str) -> str:
    mark = f"end-{secrets.token_hex(8)}"
    # Not `set -e`, which would end the session: the first failure is told at the end of the block.
    body = f"trap 'failed=$?' ERR; failed=0\n{commands}\nprintf '\\n%s %s\\n' {mark} $failed\n"
    process.stdin.write(body.encode())
    process.stdin.flush()
    output, end_s = b"", time.monotonic() + LIMIT_S
    ended = re.compile(rb"^" + mark.encode() + rb" (\d+)$", re.MULTILINE)
    while (match := ended.search(output)) is None:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end_s - time.monotonic()))
        data = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not data:
            raise GuideFailed(f"{where}: no end within {LIMIT_S:g} s; so far:\n{output.decode(errors='replace')}")
        output += data
    text = output[: match.start()].decode(errors="replace").removesuffix("\n")
    if match[1] != b"0":
        raise GuideFailed(f"{where}: exit code {match[1].decode()}:\n{text}")
    return text
