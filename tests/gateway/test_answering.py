"""Whole small answers: one write, and the same bytes as uvicorn's own way."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tide_gateway.endpoints.sending import UNCOUNTED_BYTES, HeldSend
from tide_gateway.load import Held, Load
from tide_sdk.answering import answer_whole


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.pieces.append(b"closed")


def cycle_on(wire: Wire, method: str = "POST") -> RequestResponseCycle:
    log = logging.getLogger("test")
    return RequestResponseCycle(
        {"type": "http", "method": method, "path": "/", "headers": []},  # type: ignore[arg-type]
        *(wire, FlowControl(wire), log, log, False, [], asyncio.Event(), False, True, lambda: None),
    )


async def answered(cycle: RequestResponseCycle, body: bytes, *, short: bool) -> int:
    sending = HeldSend(cycle.send, Held(Load()))  # type: ignore[arg-type]
    await sending.json(200, body, partial(answer_whole, cycle) if short else None)
    return sending.status


@pytest.mark.parametrize("body", [b"{}", b"x" * UNCOUNTED_BYTES])
async def test_a_small_answer_is_one_write_of_the_same_bytes(body):
    short, long = Wire(), Wire()
    cycle = cycle_on(short)
    assert await answered(cycle, body, short=True) == 200
    assert await answered(cycle_on(long), body, short=False) == 200
    assert short.pieces == [b"".join(long.pieces)]
    assert cycle.response_started
    assert cycle.response_complete
    assert cycle.message_event.is_set()


async def test_a_large_answer_goes_the_long_way():
    wire = Wire()
    assert await answered(cycle_on(wire), b"x" * (UNCOUNTED_BYTES + 1), short=True) == 200
    assert len(wire.pieces) > 1


def ended(cycle: RequestResponseCycle) -> None:
    cycle.keep_alive = False


def gone(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True


def begun(cycle: RequestResponseCycle) -> None:
    cycle.response_started = True


def slow(cycle: RequestResponseCycle) -> None:
    cycle.flow.pause_writing()


def dated(cycle: RequestResponseCycle) -> None:
    cycle.default_headers = [(b"date", b"now")]


@pytest.mark.parametrize("state", [ended, gone, begun, slow, dated])
async def test_what_is_not_plain_goes_the_long_way(state):
    wire = Wire()
    cycle = cycle_on(wire)
    state(cycle)
    assert not answer_whole(cycle, 200, b"", b"{}")
    assert wire.pieces == []


async def test_a_connection_that_ends_with_its_answer_is_told_so():
    wire = Wire()
    cycle = cycle_on(wire)
    cycle.keep_alive = False
    assert await answered(cycle, b"{}", short=True) == 200
    assert b"connection: close\r\n" in wire.pieces[0]
    assert wire.pieces[-1] == b"closed"
