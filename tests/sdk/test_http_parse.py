"""The response parser: any split of the bytes gives the same answer, and nothing malformed gets through."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_sdk.http_parse import ResponseError, ResponseParser

OK = b"HTTP/1.1 200 OK\r\n"
RESPONSES = {
    "length": (OK + b"Content-Length: 5\r\nX-A: 1\r\n\r\nhello", b"hello"),
    "chunked": (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nT: 1\r\n\r\n", b"hello"),
    "empty": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 0\r\n\r\n", b""),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", b"x"),
}


def feed(data: bytes, cuts: list[int], max_body_bytes: int = 1000) -> ResponseParser:
    parser = ResponseParser(max_body_bytes)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    done = False
    for start, end in pairwise(edges):
        if end > start:
            assert not done
            done = parser.feed(data[start:end])
    return parser


@given(st.sampled_from(sorted(RESPONSES)), st.lists(st.integers(0, 10_000), max_size=30))
def test_every_split_gives_the_same_response(name, cuts):
    data, body = RESPONSES[name]
    parser = feed(data, cuts)
    assert parser.response is not None
    assert parser.response.body == body
    assert parser.reusable


@given(st.lists(st.integers(0, 10_000), max_size=10))
def test_a_body_without_length_ends_with_the_connection(cuts):
    parser = feed(OK + b"\r\nall of it", cuts)
    assert parser.response is None
    assert parser.eof()
    assert parser.response.body == b"all of it"
    assert not parser.reusable


@pytest.mark.parametrize(
    "data", [OK, OK + b"Content-Length: 5\r\n\r\nhell", OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel", b""]
)
def test_a_truncated_response_is_not_completed_by_the_end_of_the_connection(data):
    parser = ResponseParser(1000)
    parser.feed(data)
    assert not parser.eof()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"SSH",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"Name : x\r\n\r\n",
        OK + b" folded: x\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\n",
        OK + b"Content-Length: 1001\r\n\r\n",
        OK + b"\r\n" + b"x" * 1001,
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nxy\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 200,
        OK + b"X: " + b"y" * 70_000,
        OK + b"a: b\r\n" * 200 + b"\r\n",
    ],
)
def test_garbage_and_excess_are_refused(data):
    with pytest.raises(ResponseError):
        ResponseParser(1000).feed(data)


@pytest.mark.parametrize(
    "data",
    [
        OK + b"Content-Length: 1\r\n\r\nxHTTP/1.1 200 OK\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1",
        OK + b"Connection: close\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
    ],
)
def test_a_connection_is_not_used_again_after_extra_bytes_or_close(data):
    parser = ResponseParser(1000)
    assert parser.feed(data)
    assert not parser.reusable


def test_repeated_headers_are_joined_and_names_are_lowered():
    parser = ResponseParser(1000)
    parser.feed(OK + b"X-A: 1\r\nx-a: 2\r\nContent-Length: 0\r\n\r\n")
    assert parser.response.headers["x-a"] == "1, 2"
