"""Footprints arrive in batches and in sequence; what is lost is counted."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from tide_sdk import codec
from tide_sdk.footprints import Footprint, FootprintReporter
from tide_sdk.http import Disconnected
from tide_sdk.http_parse import Response
from tide_sdk.model_errors import ContextOverflow, ModelStopped


class Router:
    def __init__(self, *failures) -> None:
        self.failures = list(failures)
        self.batches: list[list[dict]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def request(self, method, path, body=None, *, headers=None, timeout_s=None, idempotent=False):
        assert (method, path, idempotent) == ("POST", "/footprints", True)
        await self.gate.wait()
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return failure
        self.batches.append(codec.loads(body))
        return Response(204, {}, b"")

    async def aclose(self):
        pass


def report(reporter, task="t", turn=0):
    return reporter.report(task, turn, prompt_tokens=5, completion_tokens=2)


async def test_one_tick_is_one_batch_in_sequence():
    router = Router()
    async with FootprintReporter("http://r", http=router) as reporter:
        assert await asyncio.gather(*(report(reporter, turn=turn) for turn in range(5))) == [True] * 5
        assert await report(reporter, turn=5)
    first, second = [[Footprint.model_validate(item) for item in batch] for batch in router.batches]
    numbers = [item.sequence for item in (*first, *second)]
    assert numbers == list(range(numbers[0], numbers[0] + 6))
    later = FootprintReporter("http://r", http=Router())
    await report(later)
    assert later._http.batches[0][0]["sequence"] > numbers[-1], "a reporter that starts again goes on above"
    assert first[0].context_tokens == 7
    assert (reporter.num_sent, reporter.num_lost) == (6, 0)


async def test_reports_gather_while_a_batch_is_under_way_up_to_a_bound():
    router = Router()
    router.gate.clear()
    reporter = FootprintReporter("http://r", http=router, max_pending=4, max_batch=3)
    calls = [asyncio.create_task(report(reporter))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calls += [asyncio.create_task(report(reporter)) for _ in range(6)]
    await asyncio.sleep(0)
    router.gate.set()
    assert await asyncio.gather(*calls) == [True] * 5 + [False] * 2
    assert [len(batch) for batch in router.batches] == [1, 3, 1]
    assert (reporter.num_sent, reporter.num_lost) == (5, 2)


async def test_a_lost_answer_is_tried_again_and_a_refusal_is_not(clock):
    router = Router(Disconnected("x"), Response(503, {}, b""))
    async with FootprintReporter("http://r", http=router, sleep=clock.sleep) as reporter:
        assert await report(reporter)
        router.failures.append(Response(422, {}, b'{"code":"invalid"}'))
        assert not await report(reporter)
    assert (reporter.num_sent, reporter.num_lost) == (1, 1)


async def test_a_silent_router_loses_reports_and_blocks_nobody():
    router = Router()
    router.gate.clear()
    reporter = FootprintReporter("http://r", http=router, deadline_s=0.01)
    calls = [asyncio.create_task(report(reporter)) for _ in range(2)]
    assert await asyncio.gather(*calls) == [False, False]
    last = asyncio.create_task(report(reporter))
    await asyncio.sleep(0)
    await reporter.aclose()
    assert await last is False
    assert reporter.num_lost == 3


@pytest.mark.parametrize(
    "wrong", [{"prompt_tokens": -1}, {"cached_tokens": 3}, {"image_tokens": 3}, {"growth_tokens": -1}, {"sequence": 0}]
)
def test_a_footprint_is_made_of_numbers_that_can_be(wrong):
    right = {"task": "t", "sequence": 1, "turn": 0, "prompt_tokens": 2, "completion_tokens": 0, "context_tokens": 0}
    Footprint(**right)
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Footprint(**right | wrong)


async def test_what_the_router_refuses_of_a_batch_is_lost_and_the_rest_is_not(caplog):
    class Picky(Router):
        async def request(self, *arguments, **options):
            await super().request(*arguments, **options)
            second = self.batches[-1][1]
            refused = [{"task": second["task"], "sequence": second["sequence"], "reason": "no such session"}]
            return Response(200, {}, codec.dumps({"accepted": 1, "refused": refused}))

    async with FootprintReporter("http://r", http=Picky()) as reporter:
        assert await asyncio.gather(*(report(reporter, task) for task in "abc")) == [True, False, True]
    assert (reporter.num_sent, reporter.num_lost) == (2, 1)
    assert "no such session" in caplog.text


async def test_a_held_report_goes_alone_and_keeps_no_other_waiting():
    router = Router()
    router.gate.clear()
    reporter = FootprintReporter("http://r", http=router)
    held = asyncio.create_task(reporter.report("t", 0, prompt_tokens=5, completion_tokens=2, hold=True))
    await asyncio.sleep(0)
    free = Router()
    reporter._http = free
    assert await report(reporter, "other")
    assert not held.done()
    router.gate.set()
    assert await held
    assert [len(batch) for batch in (*router.batches, *free.batches)] == [1, 1]
    assert router.batches[0][0]["hold"] is True


@pytest.mark.parametrize(
    ("status", "code", "failure"),
    [(400, "context_length_exceeded", ContextOverflow), (410, "session_ended", ModelStopped)],
)
async def test_a_held_report_raises_what_a_call_would(status, code, failure):
    answer = Response(status, {}, codec.dumps({"error": {"code": code, "message": "x"}}))
    async with FootprintReporter("http://r", http=Router(answer)) as reporter:
        with pytest.raises(failure):
            await reporter.report("t", 0, prompt_tokens=5, completion_tokens=2, hold=True)


async def test_a_held_report_is_repeated_with_its_sequence_until_it_is_answered(clock):
    router = Router(Disconnected("x"), Response(503, {}, b""), Response(429, {}, b""))
    async with FootprintReporter("http://r", http=router, sleep=clock.sleep) as reporter:
        assert await reporter.report("t", 0, prompt_tokens=5, completion_tokens=2, hold=True)
    assert (reporter.num_sent, reporter.num_lost, len(router.batches)) == (1, 0, 1)


@pytest.mark.parametrize("sequence", [None, "x", [], {}, 1.5, 7])
async def test_an_answer_that_refuses_what_was_never_sent_stops_no_report(sequence):
    router = Router(Response(200, {}, codec.dumps({"refused": [{"sequence": sequence}, "?", None]})))
    async with FootprintReporter("http://router", http=router, max_batch=1) as reporter, asyncio.timeout(10):
        assert await asyncio.gather(*(report(reporter, turn=turn) for turn in range(3))) == [True] * 3
    assert (reporter.num_sent, reporter.num_lost) == (3, 0)
