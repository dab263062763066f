"""What a rank's tasks will hold at the worst moment to come."""

from __future__ import annotations

import random

from tide_trainer.scheduling.budget import PeakLedger


def simulated_peak(tasks: list[tuple[int, int]]) -> int:
    """All grow token by token at one pace; each leaves once it has grown by what remained."""
    return max(
        sum(tokens + grown for tokens, remaining in tasks if remaining >= grown)
        for grown in range(max((remaining for _, remaining in tasks), default=0) + 1)
    )


def test_the_peak_is_that_of_tasks_that_grow_at_one_pace() -> None:
    choose = random.Random(1)
    for _ in range(50):
        ledger = PeakLedger(1)
        tasks = [(choose.randint(1, 60), choose.choice([0, 0, 5, choose.randint(0, 31)])) for _ in range(8)]
        for index, (tokens, remaining) in enumerate(tasks):
            expected = simulated_peak(tasks[: index + 1])
            assert ledger.fits(expected, tokens, "", 0, remaining)
            assert not ledger.fits(expected - 1, tokens, "", 0, remaining)
            ledger.charge(f"t{index}", tokens, "", 0, remaining)
            assert ledger.peak_tokens == ledger.recount() == expected
        for index in range(8):
            ledger.release(f"t{index}")
        assert ledger.peak_tokens == 0


def test_tasks_that_finish_at_different_times_need_less_than_their_sum() -> None:
    ledger = PeakLedger(1)
    ledger.charge("nearly done", 90, "", 0, 10)
    ledger.charge("young", 10, "", 0, 90)
    assert ledger.peak_tokens == 120


def test_large_remainders_are_kept_to_one_part_in_32() -> None:
    for remaining in (31, 33, 100, 1000, 5001, 123_457):
        ledger = PeakLedger(1)
        ledger.charge("a", 1, "", 0, remaining)
        assert abs(ledger.peak_tokens - 1 - remaining) <= remaining / 32


def test_a_prefix_counts_once_among_those_that_are_left() -> None:
    ledger = PeakLedger(10)
    for task, remaining in (("a", 50), ("b", 20), ("c", 0)):
        ledger.charge(task, 101, "g", 59, remaining)
    # Blocks of 10: 110 each, 50 of them shared. c leaves, then b, then a.
    assert ledger.peak_tokens == max(110 + 60 + 60, 110 + 60 + 2 * 20, 110 + 50)
    ledger.charge("c", 200, "g", 59, 0)
    assert ledger.peak_tokens == 110 + 60 + 150
