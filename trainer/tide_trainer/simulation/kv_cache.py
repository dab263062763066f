"""A paged KV cache with prefix reuse: blocks in use, blocks that are free but still hold content, evicted oldest first.

Content is a chain of blocks: what all tasks share, what a group shares, what one task has of its own. A chain's blocks
are freed together and their last ones are evicted first, so that a chain always holds a prefix of its content and one
number describes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Chain:
    """Consecutive blocks of one content. `num_cached` of them, from the first, are in the cache."""

    __slots__ = ("num_blocks", "num_cached", "num_users")

    def __init__(self, num_blocks: int | None = None) -> None:
        """Makes a chain of so many blocks; None: it grows (a task's own content)."""
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.num_users = 0


class Holding:
    """What one request holds: shared chains, and `num_own` blocks that nobody else uses."""

    __slots__ = ("num_held", "num_own", "own", "shared")

    def __init__(self, shared: Sequence[Chain], own: Chain) -> None:
        """Holds nothing yet of its content."""
        self.shared = shared
        self.own = own
        self.num_held = 0
        self.num_own = 0


class KvCache:
    """Counts blocks; `num_used + num_reusable` never exceeds `num_blocks`."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        """Makes an empty cache of `num_blocks` blocks of `block_tokens` tokens."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.num_used = 0
        self.num_reusable = 0
        self._oldest_first: OrderedDict[Chain, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, whether they hold content or not."""
        return self.num_blocks - self.num_used

    def take(self, holding: Holding, num_tokens: int, max_new_tokens: int) -> int | None:
        """Gives a request that holds nothing the cached prefix of its content, and blocks for a first chunk.

        Args:
            holding: of the request.
            num_tokens: of its whole prompt; at least one of them is computed.
            max_new_tokens: most tokens that may be computed now.

        Returns:
            Cached tokens; None if there are too few free blocks, and then nothing has changed.
        """
        block_tokens = self.block_tokens
        limit = (num_tokens - 1) // block_tokens
        num_hit = _cached_prefix(holding, limit)
        end = min(num_tokens, num_hit * block_tokens + max_new_tokens)
        num_idle = sum(chain.num_cached for chain in (*holding.shared, holding.own) if chain.num_users == 0)
        if -(-end // block_tokens) - num_hit + num_idle > self.num_free:
            return None
        for chain in holding.shared:
            self._use(chain)
        own = holding.own
        self._use(own)
        num_shared = sum(chain.num_blocks or 0 for chain in holding.shared)
        reused = max(0, num_hit - num_shared)
        # What of its own content is not reused is computed afresh; its old blocks are given up.
        self.num_used -= own.num_cached - reused
        own.num_cached = 0
        holding.num_held, holding.num_own = num_hit, reused
        self.extend(holding, -(-end // block_tokens))
        return num_hit * block_tokens

    def extend(self, holding: Holding, num_blocks: int) -> bool:
        """Lets a request hold its first `num_blocks` blocks; False if there are too few free ones (nothing changes)."""
        begin = holding.num_held
        more = num_blocks - begin
        if more <= 0:
            return True
        if more > self.num_free:
            return False
        added = more
        first = 0
        for chain in holding.shared:
            last = first + (chain.num_blocks or 0)
            if begin < last and num_blocks > first + chain.num_cached:
                # The first to compute a shared block makes it everybody's.
                upto = min(num_blocks, last) - first
                added_here = upto - max(chain.num_cached, begin - first)
                if chain.num_cached >= begin - first:
                    chain.num_cached = upto
                    added -= added_here
                    self._claim(added_here)
            first = last
        self._claim(added)
        holding.num_own += added
        holding.num_held = num_blocks
        return True

    def grow(self, holding: Holding) -> bool:
        """Lets a request hold one more block, past its shared content; False if none is free."""
        if self.num_used == self.num_blocks:
            return False
        self._claim(1)
        holding.num_own += 1
        holding.num_held += 1
        return True

    def release(self, holding: Holding, num_computed_tokens: int) -> None:
        """The request is done or preempted: its full blocks stay reusable until they are evicted."""
        num_shared = sum(chain.num_blocks or 0 for chain in holding.shared)
        own = holding.own
        own.num_cached = max(0, min(num_computed_tokens // self.block_tokens - num_shared, holding.num_own))
        self.num_used -= holding.num_own - own.num_cached
        holding.num_held = holding.num_own = 0
        self._leave(own)
        # As the engine does: the last blocks of a request are freed, and so evicted, before its first ones.
        for chain in reversed(holding.shared):
            self._leave(chain)

    def check(self) -> None:
        """Raises AssertionError if a sum is wrong. O(chains)."""
        assert self.num_reusable == sum(chain.num_cached for chain in self._oldest_first)
        assert all(chain.num_users == 0 and chain.num_cached > 0 for chain in self._oldest_first)
        assert 0 <= self.num_used <= self.num_used + self.num_reusable <= self.num_blocks

    def _claim(self, count: int) -> None:
        """Takes free blocks: empty ones first, then those whose content was used longest ago."""
        self.num_used += count
        evict = self.num_used + self.num_reusable - self.num_blocks
        while evict > 0:
            oldest = next(iter(self._oldest_first))
            lost = min(evict, oldest.num_cached)
            oldest.num_cached -= lost
            self.num_reusable -= lost
            evict -= lost
            if oldest.num_cached == 0:
                del self._oldest_first[oldest]

    def _use(self, chain: Chain) -> None:
        if chain.num_users == 0 and chain.num_cached:
            del self._oldest_first[chain]
            self.num_reusable -= chain.num_cached
            self.num_used += chain.num_cached
        chain.num_users += 1

    def _leave(self, chain: Chain) -> None:
        chain.num_users -= 1
        if chain.num_users == 0 and chain.num_cached:
            self._oldest_first[chain] = None
            self.num_reusable += chain.num_cached
            self.num_used -= chain.num_cached


def _cached_prefix(holding: Holding, limit: int) -> int:
    num_hit = 0
    for chain in holding.shared:
        num_hit += chain.num_cached
        if chain.num_cached < (chain.num_blocks or 0):
            return min(num_hit, limit)
    return min(num_hit + holding.own.num_cached, limit)
