"""The split of an update over ranks and micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tide_trainer.backends.micro_batches import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 1000))
def test_every_sequence_once_and_the_same_number_of_micro_batches_on_each_rank(lengths, num_ranks, max_tokens):
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert len(plan) == num_ranks
    assert len({len(share) for share in plan}) == 1
    assert sorted(i for share in plan for micro_batch in share for i in micro_batch) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 1000))
def test_padded_tokens_stay_within_the_limit_unless_one_sequence_is_longer(lengths, num_ranks, max_tokens):
    for share in plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens):
        for micro_batch in share:
            width = max((lengths[i] for i in micro_batch), default=0)
            assert len(micro_batch) <= 1 or width * len(micro_batch) <= max_tokens


def test_a_small_batch_feeds_every_rank():
    plan = plan_micro_batches([10] * 8, num_ranks=4, max_tokens=10_000)
    assert [sum(map(len, share)) for share in plan] == [2, 2, 2, 2]


def test_similar_lengths_go_together():
    assert plan_micro_batches([2, 9, 2, 9], num_ranks=1, max_tokens=18) == [[[1, 3], [0, 2]]]
