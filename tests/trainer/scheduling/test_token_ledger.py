"""Charges in whole blocks, a group's shared prefix once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tide_trainer.scheduling.budget import TokenLedger


def test_footprints_round_up_to_blocks_and_shared_prefixes_down() -> None:
    ledger = TokenLedger(block_tokens=32)
    ledger.charge("a", 100, "g", 70)
    assert ledger.usage_tokens == 128
    assert ledger.marginal_tokens(100, "g", 70) == 64
    ledger.charge("b", 100, "g", 70)
    assert ledger.usage_tokens == 192
    ledger.release("a")
    assert ledger.usage_tokens == 128
    ledger.release("a")
    assert ledger.usage_tokens == 128


def test_a_second_charge_replaces_the_first() -> None:
    ledger = TokenLedger(block_tokens=1)
    ledger.charge("a", 10, "g", 0)
    ledger.charge("a", 25, "g", 0)
    assert (ledger.usage_tokens, ledger.tokens_of("a"), len(ledger)) == (25, 25, 1)


def test_a_sibling_with_another_first_prompt_or_a_cut_context_shares_nothing() -> None:
    ledger = TokenLedger(block_tokens=1)
    ledger.charge("a", 100, "g", 50)
    ledger.charge("b", 100, "g", 60)
    ledger.charge("c", 40, "g", 50)
    ledger.charge("d", 100, "other", 50)
    assert ledger.usage_tokens == 340


charges = st.tuples(st.integers(0, 9), st.integers(1, 200), st.integers(0, 2), st.sampled_from([0, 40, 40, 64]))


@given(block_tokens=st.sampled_from([1, 16, 32]), steps=st.lists(st.one_of(charges, st.integers(0, 9)), max_size=60))
def test_the_usage_is_the_sum_and_a_charge_adds_its_marginal(block_tokens: int, steps: list) -> None:
    ledger = TokenLedger(block_tokens)
    for step in steps:
        if isinstance(step, int):
            ledger.release(f"t{step}")
        else:
            task, tokens, group, shared = step
            ledger.release(f"t{task}")
            expected = ledger.usage_tokens + ledger.marginal_tokens(tokens, f"g{group}", shared)
            ledger.charge(f"t{task}", tokens, f"g{group}", shared)
            assert ledger.usage_tokens == expected
        assert ledger.usage_tokens == ledger.recount() >= 0
    for task in range(10):
        ledger.release(f"t{task}")
    assert ledger.usage_tokens == 0
