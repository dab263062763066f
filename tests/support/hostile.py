"""Callers that mean no good, on raw connections to a gateway process, and what they cost it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MIB = 2**20
ANSWER_LIMIT_S = 60.0
PIECE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Answer:
    """Status, headers and body; status 0 where the connection ended without an answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def problem(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Hostile:
    """Makes raw calls with one owner's token.

    Args:
        url: of the gateway.
        token: whose calls they are.
    """

    url: str
    token: str
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that stays open until `close`."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        self.writers.append(writer)
        return reader, writer

    def head(self, method: str, path: str, **headers: str | int) -> bytes:
        """The bytes of a request's head; `_` in a header's name is a dash."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {self.token}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    async def post(self, path: str, body: bytes | Iterable[bytes], **headers: str | int) -> Answer:
        """Send a body, with its length where it is bytes and in chunks otherwise, until it is sent or answered."""
        reader, writer = await self.connect()
        fields: dict[str, str | int] = {"Content_Type": "application/json"} | headers
        if isinstance(body, bytes):
            fields = {"Content_Length": len(body)} | fields
            pieces: Iterable[bytes] = (body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))
        else:
            fields["Transfer_Encoding"] = "chunked"
            pieces = [*(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in body), b"0\r\n\r\n"]
        answering = asyncio.create_task(read_answer(reader))
        with contextlib.suppress(ConnectionError):
            writer.write(self.head("POST", path, **fields))
            for piece in pieces:
                if answering.done():
                    break
                writer.write(piece)
                await writer.drain()
        answer = await asyncio.wait_for(answering, ANSWER_LIMIT_S)
        # Cut and not closed: with bytes unsent, a closed transport of CPython 3.11 may not be aborted any more.
        self.writers.remove(writer)
        writer.transport.abort()
        return answer

    async def close(self) -> None:
        """Cut all connections."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()
        await asyncio.sleep(0)


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One answer with a Content-Length."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        body = await reader.readexactly(int(headers["content-length"]))
    except (ConnectionError, asyncio.IncompleteReadError):
        return Answer(0)
    return Answer(int(head[0].split()[1]), headers, body)


class Memory:
    """The peak of a process's resident memory since the object was made."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        # Forgets the peak so far.
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    def peak_growth(self) -> int:
        """Bytes by which the peak is above what was resident at first."""
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        for line in self._status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(name)


def action(task_id: str, turn: int, content: str) -> bytes:
    """The body of `/observation`."""
    message = {"role": "assistant", "content": content}
    return json.dumps({"task_id": task_id, "turn": turn, "message": message}).encode()


def counted(answers: Sequence[Answer]) -> dict[int, int]:
    """How many answers had each status."""
    return {status: sum(answer.status == status for answer in answers) for status in {a.status for a in answers}}
