"""Tokens that a rank's tasks hold and will hold, and what one more would add; a group's first prompt counts once."""

from __future__ import annotations

from bisect import bisect_left, insort


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


class PeakLedger:
    """What a rank's tasks will hold together at the worst moment to come.

    All are taken to grow at one pace, and each to leave once it has grown by what remains to it. So the use peaks
    when one of them is about to leave: `max over j of the sum over {i: r_i >= r_j} of (c_i + r_j)`. What remains is
    kept to one part in 32: a look takes some dozens of steps, however many tasks there are.
    """

    __slots__ = ("_block_tokens", "_groups", "_peak_tokens", "_remainders", "_sums", "_tasks")

    def __init__(self, block_tokens: int) -> None:
        """Makes an empty ledger; footprints are rounded up, and shared prefixes down, to `block_tokens`."""
        self._block_tokens = block_tokens
        # task -> (remainder, tokens without a shared prefix, group whose prefix it shares or None)
        self._tasks: dict[str, tuple[int, int, str | None]] = {}
        # group -> (shared tokens, the remainder at which they count: its members' largest, remainder by member)
        self._groups: dict[str, tuple[int, int, dict[str, int]]] = {}
        # remainder -> (tokens, tasks); and the remainders in order
        self._sums: dict[int, tuple[int, int]] = {}
        self._remainders: list[int] = []
        self._peak_tokens: int | None = None

    def __contains__(self, task: str) -> bool:
        return task in self._tasks

    @property
    def peak_tokens(self) -> int:
        """The most that the tasks will hold."""
        if self._peak_tokens is not None:
            return self._peak_tokens
        total = num = peak = 0
        for remainder in reversed(self._remainders):
            tokens, count = self._sums[remainder]
            total, num = total + tokens, num + count
            peak = max(peak, total + num * remainder)
        self._peak_tokens = peak
        return peak

    def charge(self, task: str, tokens: int, group: str, shared_tokens: int, remaining_tokens: int) -> None:
        """Sets what the task holds and by how much it will grow; a second call replaces the first."""
        self.release(task)
        remainder = _coarse(remaining_tokens)
        own, shared = self._split(tokens, group, shared_tokens)
        self._tasks[task] = (remainder, own, group if shared else None)
        self._add(remainder, own, 1)
        if shared:
            _, at, members = self._groups.get(group, (shared, -1, dict[str, int]()))
            members[task] = remainder
            self._count_prefix(group, shared, at, members)

    def release(self, task: str) -> None:
        """Drops the task, if it is here. O(siblings)."""
        known = self._tasks.pop(task, None)
        if known is None:
            return
        remainder, own, group = known
        self._add(remainder, -own, -1)
        if group is not None:
            shared, at, members = self._groups[group]
            del members[task]
            self._count_prefix(group, shared, at, members)

    def fits(self, budget_tokens: int, tokens: int, group: str, shared_tokens: int, remaining_tokens: int) -> bool:
        """Whether the peak stays within the budget with one more task."""
        if self.peak_tokens > budget_tokens:
            return False
        mine = _coarse(remaining_tokens)
        own, shared = self._split(tokens, group, shared_tokens)
        own += shared if group not in self._groups else 0
        total = num = 0
        is_in = False
        for remainder in reversed(self._remainders):
            if not is_in and remainder <= mine:
                is_in, total, num = True, total + own, num + 1
                if total + num * mine > budget_tokens:
                    return False
            held, count = self._sums[remainder]
            total, num = total + held, num + count
            if total + num * remainder > budget_tokens:
                return False
        return is_in or total + own + (num + 1) * mine <= budget_tokens

    def recount(self) -> int:
        """The peak computed afresh, for checks."""
        again = PeakLedger(self._block_tokens)
        for task, (remainder, own, group) in self._tasks.items():
            shared = 0 if group is None else self._groups[group][0]
            again.charge(task, own + shared, group or "", shared, remainder)
        return again.peak_tokens

    def _split(self, tokens: int, group: str, shared_tokens: int) -> tuple[int, int]:
        """A task's own tokens and those that it shares, in whole blocks."""
        whole = -(-tokens // self._block_tokens) * self._block_tokens
        shared = shared_tokens // self._block_tokens * self._block_tokens
        agreed = self._groups[group][0] if group in self._groups else shared
        return (whole - shared, shared) if 0 < shared == agreed <= whole else (whole, 0)

    def _count_prefix(self, group: str, shared: int, at: int, members: dict[str, int]) -> None:
        """Counts a group's prefix until the last of its members leaves."""
        longest = max(members.values(), default=-1)
        if longest != at:
            if at >= 0:
                self._add(at, -shared, 0)
            if longest >= 0:
                self._add(longest, shared, 0)
        if members:
            self._groups[group] = (shared, longest, members)
        else:
            del self._groups[group]

    def _add(self, remainder: int, tokens: int, num: int) -> None:
        self._peak_tokens = None
        known = self._sums.get(remainder)
        if known is None:
            insort(self._remainders, remainder)
            known = (0, 0)
        total = (known[0] + tokens, known[1] + num)
        if total == (0, 0):
            del self._sums[remainder]
            del self._remainders[bisect_left(self._remainders, remainder)]
        else:
            self._sums[remainder] = total


def _coarse(tokens: int) -> int:
    """To the nearest of 16 to 32 steps between a power of two and the next; exact below 32."""
    step = 1 << max(0, tokens.bit_length() - 5)
    return (tokens + step // 2) // step * step
