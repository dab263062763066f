"""A strict parser of one HTTP/1.1 response: pure, fed with bytes in any pieces.

Own code because a callback per header of a C parser costs as much as this, and because being strict (one length, no
folded headers, no bytes left over) is what keeps two answers on a kept-alive connection apart.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
_MAX_CHUNK_LINE_BYTES = 1024
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n\0]*)?")
_HEX = re.compile(rb"[0-9a-fA-F]{1,15}")


class ResponseError(Exception):
    """The peer's bytes are not an HTTP/1.1 response within the limits."""


class Response(NamedTuple):
    """One answer. Header names are in lower case; repeated headers are joined with a comma."""

    status: int
    headers: dict[str, str]
    body: bytes


class ResponseParser:
    """Parses one response; a second one on the same connection wants a new parser.

    Attributes:
        started: True once a byte of the response has been seen.
        reusable: True if the connection may carry another request after this response.
    """

    __slots__ = (
        "_body",
        "_buffer",
        "_chunk_left",
        "_headers",
        "_in_trailer",
        "_length",
        "_mode",
        "_num_body_bytes",
        "_num_trailers",
        "_status",
        "max_body_bytes",
        "response",
        "reusable",
        "started",
    )

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.response: Response | None = None
        self.reusable = False
        self.started = False
        self._mode = "head"
        self._buffer: bytes = b""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._length = 0
        self._body: list[bytes] = []
        self._num_body_bytes = 0
        self._chunk_left = -1
        self._in_trailer = False
        self._num_trailers = 0

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; True once the response is complete.

        Raises:
            ResponseError: malformed or over a limit; close the connection.
        """
        self.started = True
        while self._mode == "head":
            data = self._buffer + data if self._buffer else data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise ResponseError(f"the response head is larger than {MAX_HEAD_BYTES} bytes")
                self._check_beginning(data)
                self._buffer = data
                return False
            if end > MAX_HEAD_BYTES:
                raise ResponseError(f"the response head is larger than {MAX_HEAD_BYTES} bytes")
            self._buffer = b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._mode == "length":
            return self._feed_length(data)
        if self._mode == "chunked":
            return self._feed_chunked(data)
        self._add_body(data)
        return False

    def eof(self) -> bool:
        """Note that the peer closed; True if that completes the response (a body without a stated length)."""
        if self._mode == "until_eof" and self.response is None:
            self._finish(b"")
            return True
        return self.response is not None

    @staticmethod
    def _check_beginning(data: bytes) -> None:
        if not data.startswith(b"HTTP/1."[: len(data)]):
            raise ResponseError(f"the peer does not speak HTTP/1: {data[:40]!r}")

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        match = _STATUS_LINE.fullmatch(lines[0])
        if match is None:
            raise ResponseError(f"bad status line {lines[0][:80]!r}")
        if len(lines) > MAX_HEADERS:
            raise ResponseError(f"more than {MAX_HEADERS} headers")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            raw_name, colon, raw_value = line.partition(b":")
            if not colon or not raw_name or raw_name != raw_name.strip() or b"\n" in line or b"\0" in line:
                raise ResponseError(f"bad header line {line[:80]!r}")
            name, value = raw_name.decode("latin-1").lower(), raw_value.strip(b" \t").decode("latin-1")
            if name in headers:
                if name == "content-length" and headers[name] == value:
                    continue
                value = f"{headers[name]}, {value}"
            headers[name] = value
        status = int(match[2])
        if status < 200:
            if status == 101:
                raise ResponseError("the peer switched protocols unasked")
            return  # an interim answer: the real one follows
        self._status, self._headers = status, headers
        self.reusable = match[1] == b"1" and "close" not in headers.get("connection", "").lower()
        self._choose_framing()

    def _choose_framing(self) -> None:
        headers = self._headers
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ResponseError(f"content-encoding {headers['content-encoding']!r} was not asked for")
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise ResponseError("transfer-encoding must be chunked alone, without content-length")
            self._mode = "chunked"
        elif self._status in (204, 304):
            self._mode, self._length = "length", 0
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) < 16):
                raise ResponseError(f"bad content-length {length[:40]!r}")
            self._mode, self._length = "length", int(length)
            self._check_size(self._length)
        else:
            self._mode, self.reusable = "until_eof", False

    def _feed_length(self, data: bytes) -> bool:
        missing = self._length - self._num_body_bytes
        if len(data) > missing:
            data, self.reusable = data[:missing], False
        if len(data) == missing:
            self._finish(data)
            return True
        self._add_body(data)
        return False

    def _feed_chunked(self, data: bytes) -> bool:
        position = 0
        data = self._buffer + data if self._buffer else data
        while True:
            if self._chunk_left > 0:
                piece = data[position : position + self._chunk_left]
                self._add_body(piece)
                position += len(piece)
                self._chunk_left -= len(piece)
                if self._chunk_left:
                    self._buffer = b""
                    return False
            # Here the rest of a line is read: a chunk's closing line break, a size, or a trailer.
            end = data.find(b"\r\n", position)
            if end < 0:
                self._buffer = data[position:]
                if len(self._buffer) > _MAX_CHUNK_LINE_BYTES:
                    raise ResponseError("a chunk line is too long")
                return False
            line, position = data[position:end], end + 2
            if self._in_trailer:
                if not line:
                    self.reusable = self.reusable and position == len(data)
                    self._finish(b"")
                    return True
                self._num_trailers += 1
                if self._num_trailers > MAX_HEADERS:
                    raise ResponseError(f"more than {MAX_HEADERS} trailers")
            elif self._chunk_left == 0:
                if line:
                    raise ResponseError("a chunk is longer than its size")
                self._chunk_left = -1
            else:
                self._begin_chunk(line)

    def _begin_chunk(self, line: bytes) -> None:
        size = line.partition(b";")[0].strip(b" \t")
        if _HEX.fullmatch(size) is None:
            raise ResponseError(f"bad chunk size {line[:40]!r}")
        self._chunk_left = int(size, 16)
        self._check_size(self._num_body_bytes + self._chunk_left)
        if self._chunk_left == 0:
            self._in_trailer = True

    def _add_body(self, data: bytes) -> None:
        if data:
            self._num_body_bytes += len(data)
            self._check_size(self._num_body_bytes)
            self._body.append(data)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.max_body_bytes:
            raise ResponseError(f"the response body is larger than {self.max_body_bytes} bytes")

    def _finish(self, last: bytes) -> None:
        body = b"".join((*self._body, last)) if self._body else last
        self.response = Response(self._status, self._headers, body)
