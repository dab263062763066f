"""A simulated KV cache with block-wise prefix reuse, as vLLM keeps one, without any tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Lease:
    """The blocks that one running request holds.

    Attributes:
        cached_tokens: prompt tokens found in the cache.
        shared: keys of cached blocks in use, in prompt order.
        num_private: further blocks held.
    """

    cached_tokens: int
    shared: list[int] = field(default_factory=list)
    num_private: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks held, shared ones included."""
        return len(self.shared) + self.num_private


class PrefixCache:
    """Blocks of tokens, found again by their whole prefix, dropped least recently used first.

    Args:
        num_blocks: capacity in blocks.
        block_tokens: tokens per block.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._in_use: dict[int, int] = {}
        self._num_private = 0

    @property
    def used_tokens(self) -> int:
        """Tokens in blocks that running requests hold; a block shared by several counts once."""
        return (len(self._in_use) + self._num_private) * self.block_tokens

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prompt could find again, those in use included."""
        return len(self._in_use) + len(self._idle)

    def acquire(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Lease | None:
        """Takes the blocks of a request; None if they do not fit now, and then nothing is taken."""
        # One prompt token is always computed: its logits give the first new token.
        hits = self._hits(prompt_ids[: len(prompt_ids) - 1])
        total = -(-(len(prompt_ids) + max_new_tokens) // self.block_tokens)
        num_private = total - len(hits)
        num_idle_left = len(self._idle) - sum(1 for key in hits if key not in self._in_use)
        held = len(self._in_use) + self._num_private + (len(self._idle) - num_idle_left)
        if held + num_private > self.num_blocks:
            return None
        for key in hits:
            self._idle.pop(key, None)
            self._in_use[key] = self._in_use.get(key, 0) + 1
        self._num_private += num_private
        self._evict()
        return Lease(len(hits) * self.block_tokens, hits, num_private)

    def release(self, lease: Lease, token_ids: Sequence[int] = ()) -> None:
        """Gives a request's blocks back and keeps the full blocks of `token_ids` (prompt and completion) cached."""
        for key in lease.shared:
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]
                self._idle[key] = None
        self._num_private -= lease.num_private
        # Last block first, so that eviction shortens a prefix from its end.
        for key in reversed(self._keys(token_ids)):
            if key not in self._in_use:
                self._idle[key] = None
                self._idle.move_to_end(key)
        self._evict()

    def clear(self) -> bool:
        """Forgets every cached block; False, and nothing done, while requests hold blocks."""
        if self._in_use or self._num_private:
            return False
        self._idle.clear()
        return True

    def _hits(self, token_ids: Sequence[int]) -> list[int]:
        hits: list[int] = []
        for key in self._keys(token_ids):
            if key not in self._in_use and key not in self._idle:
                break
            hits.append(key)
        return hits

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        keys: list[int] = []
        key = 0
        for begin in range(0, len(token_ids) - self.block_tokens + 1, self.block_tokens):
            key = hash((key, *token_ids[begin : begin + self.block_tokens]))
            keys.append(key)
        return keys

    def _evict(self) -> None:
        while len(self._in_use) + self._num_private + len(self._idle) > self.num_blocks:
            self._idle.popitem(last=False)
