"""Tokens that a rank's tasks hold, and what one more would add; a group's shared first prompt counts once."""

from __future__ import annotations


class TokenLedger:
    """The footprints charged to one rank, in whole KV blocks.

    `usage_tokens` is the sum of the charges minus, for each group, the shared prefix of all its members but one.
    """

    __slots__ = ("_block_tokens", "_charges", "_groups", "usage_tokens")

    def __init__(self, block_tokens: int) -> None:
        """Makes an empty ledger; footprints are rounded up, and shared prefixes down, to `block_tokens`."""
        self._block_tokens = block_tokens
        # task -> (tokens, group whose prefix it shares or None); group -> (members that share, shared tokens)
        self._charges: dict[str, tuple[int, str | None]] = {}
        self._groups: dict[str, tuple[int, int]] = {}
        self.usage_tokens = 0

    def __contains__(self, task: str) -> bool:
        return task in self._charges

    def __len__(self) -> int:
        return len(self._charges)

    def tokens_of(self, task: str) -> int:
        """The task's charge in tokens, its shared prefix included; 0 if it has none."""
        return self._charges.get(task, (0, None))[0]

    def rounded(self, tokens: int) -> int:
        """Tokens of the blocks that `tokens` fill."""
        return -(-tokens // self._block_tokens) * self._block_tokens

    def marginal_tokens(self, tokens: int, group: str, shared_tokens: int) -> int:
        """What a charge of `tokens` would add to the usage now, for a task that is not charged yet."""
        shared = shared_tokens // self._block_tokens * self._block_tokens
        whole = self.rounded(tokens)
        members, agreed = self._groups.get(group, (0, shared))
        return whole - shared if members and 0 < shared == agreed <= whole else whole

    def charge(self, task: str, tokens: int, group: str, shared_tokens: int) -> None:
        """Sets the task's charge; a second call replaces the first.

        Args:
            task: its id.
            tokens: its footprint.
            group: its group.
            shared_tokens: the part that it has in common with its siblings; 0 shares nothing.
        """
        self.release(task)
        shared = shared_tokens // self._block_tokens * self._block_tokens
        whole = self.rounded(tokens)
        members, agreed = self._groups.get(group, (0, shared))
        # A sibling whose prompt differs from the first's shares nothing that is known to be common.
        if not 0 < shared == agreed <= whole:
            self._charges[task] = (whole, None)
            self.usage_tokens += whole
            return
        self._charges[task] = (whole, group)
        self._groups[group] = (members + 1, shared)
        self.usage_tokens += whole - shared if members else whole

    def release(self, task: str) -> None:
        """Drops the task's charge, if it has one."""
        tokens, group = self._charges.pop(task, (0, None))
        self.usage_tokens -= tokens
        if group is None:
            return
        members, shared = self._groups[group]
        if members == 1:
            del self._groups[group]
        else:
            self._groups[group] = (members - 1, shared)
            self.usage_tokens += shared

    def recount(self) -> int:
        """The usage summed afresh, for checks. O(tasks)."""
        charged = sum(tokens for tokens, _ in self._charges.values())
        return charged - sum((members - 1) * shared for members, shared in self._groups.values())
