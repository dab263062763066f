"""How the sequences of one optimizer update are split over ranks and micro-batches. Pure.

Every rank gets the same number of micro-batches, some of them empty, because every rank takes part in every collective.
"""

from __future__ import annotations

from collections.abc import Sequence

Plan = list[list[list[int]]]
"""rank -> micro-batches -> indices of sequences."""


def plan_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> Plan:
    """Groups sequences of similar length, so that little is padded; the same input gives the same plan.

    Args:
        lengths: tokens of each sequence, each at least 1.
        num_ranks: ranks that share the update.
        max_tokens: most tokens of a micro-batch, padding included; a longer sequence goes alone.

    Returns:
        Each index once, and the same number of micro-batches for each rank.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    # A share of the whole, so that a batch below max_tokens still feeds every rank.
    limit = max(1, min(max_tokens, -(-sum(lengths) // num_ranks)))
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        # Longest first: the first of a micro-batch is its width.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= limit:
            batches[-1].append(index)
        else:
            batches.append([index])
    count = -(-len(batches) // num_ranks)
    return [[*batches[rank::num_ranks], *([[]] * count)][:count] for rank in range(num_ranks)]
