"""One asks for all, and nobody waits longer than the limit."""

from __future__ import annotations

import asyncio

import pytest

from tide_gateway.asked import Asked


class Oracle:
    def __init__(self) -> None:
        self.asked = 0
        self.gate = asyncio.Event()

    async def ask(self) -> int:
        self.asked += 1
        await self.gate.wait()
        if self.asked == 2:
            raise OSError("the second question fails")
        return self.asked


async def test_callers_share_a_question_and_its_answer_is_believed_for_a_while():
    oracle = Oracle()
    asked = Asked(oracle.ask, fresh_s=3600.0, limit_s=30.0)
    callers = [asyncio.create_task(asked.answer()) for _ in range(5)]
    await asyncio.sleep(0)
    callers[0].cancel()
    oracle.gate.set()
    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == [1] * 4
    assert (await asked.answer(), oracle.asked) == (1, 1)


async def test_an_answer_that_does_not_come_is_waited_for_again_and_not_asked_for_again():
    oracle = Oracle()
    asked = Asked(oracle.ask, fresh_s=3600.0, limit_s=0.01)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asked.answer()
    oracle.gate.set()
    await asyncio.sleep(0)
    assert (await asked.answer(), oracle.asked) == (1, 1)


async def test_a_failure_is_told_and_the_next_question_is_another():
    oracle = Oracle()
    oracle.gate.set()
    asked = Asked(oracle.ask, fresh_s=-1.0, limit_s=30.0)
    assert await asked.answer() == 1
    with pytest.raises(OSError, match="the second"):
        await asked.answer()
    assert await asked.answer() == 3
