"""Where the entries of the staleness buffers stand, and how they move when one is deleted (StaleFlow section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator

from tide_trainer.scheduling.staleness_types import BufferState, StalenessError


class Buffer:
    """The entries of one coming train step; reservations are kept by version, oldest first."""

    __slots__ = ("num_reserved", "occupied", "reserved")

    def __init__(self) -> None:
        self.occupied: dict[str, None] = {}
        self.reserved: dict[int, dict[str, None]] = {}
        self.num_reserved = 0

    def size(self) -> int:
        """Entries of both kinds."""
        return len(self.occupied) + self.num_reserved

    def reserved_entries(self) -> Iterator[tuple[str, int]]:
        """The reservations with their versions."""
        for version, same in self.reserved.items():
            for entry in same:
                yield entry, version


class Places:
    """The buffers `first .. first + eta` with `batch_size` places each; every entry's version and place.

    After every operation of `StalenessBuffers` two things hold: no reservation could stand in a later free place
    (they wait as late as they may), and no occupied entry stands behind a free place (training starts early).
    """

    def __init__(self, eta: int, batch_size: int, first: int) -> None:
        self.eta = eta
        self.batch_size = batch_size
        self.first = first
        self.buffers = {first + k: Buffer() for k in range(eta + 1)}
        self.version_of: dict[str, int] = {}
        self.place_of: dict[str, int] = {}

    def put_reserved(self, entry: str, place: int) -> None:
        """Files a reservation under its version."""
        buffer = self.buffers[place]
        buffer.reserved.setdefault(self.version_of[entry], {})[entry] = None
        buffer.num_reserved += 1
        self.place_of[entry] = place

    def put_occupied(self, entry: str, place: int) -> None:
        """Files a complete entry, after those that completed before it."""
        self.buffers[place].occupied[entry] = None
        self.place_of[entry] = place

    def take_reserved(self, entry: str) -> int:
        """Removes a reservation from its buffer and returns V_buf of the place that is free now."""
        place = self.place_of[entry]
        version = self.version_of[entry]
        buffer = self.buffers[place]
        same = buffer.reserved[version]
        del same[entry]
        if not same:
            del buffer.reserved[version]
        buffer.num_reserved -= 1
        return place

    def take_first(self) -> tuple[str, ...]:
        """Drops the first buffer, forgets its entries, opens a new last one; raises if one is older than the bound."""
        entries = tuple(self.buffers[self.first].occupied)
        for entry in entries:
            if self.version_of[entry] + self.eta < self.first:
                raise StalenessError(f"entry {entry!r} breaks the staleness bound {self.eta}: a fault in this module")
        for entry in entries:
            del self.version_of[entry], self.place_of[entry]
        del self.buffers[self.first]
        self.first += 1
        self.buffers[self.first + self.eta] = Buffer()
        return entries

    def state(self, place: int) -> BufferState:
        """Waiting, Ready or Stuck."""
        buffer = self.buffers[place]
        if buffer.size() < self.batch_size:
            return BufferState.WAITING
        return BufferState.STUCK if buffer.num_reserved else BufferState.READY

    def first_free(self) -> int | None:
        """The earliest buffer with a free place."""
        return next((v for v, buffer in self.buffers.items() if buffer.size() < self.batch_size), None)

    def last_free(self, limit: int) -> int | None:
        """The latest buffer up to `limit` with a free place."""
        for v in range(limit, self.first - 1, -1):
            if self.buffers[v].size() < self.batch_size:
                return v
        return None

    def exchange_for(self, place: int, limit: int) -> str | None:
        """A reservation in a buffer up to `limit` that could stand at `place` instead."""
        for v in range(self.first, limit + 1):
            for version, same in self.buffers[v].reserved.items():
                if version + self.eta >= place:
                    return next(iter(same))
        return None

    def shift_reservations(self, free: int) -> int:
        """Fills a free place with the earliest reservation that admits it, then that one's place, and so on.

        Returns:
            V_buf of the place that is free in the end: the given one or an earlier one.
        """
        # earliest[p] = the first buffer before `free` with a reservation that may stand at p; one pass fills it.
        earliest: dict[int, int] = {}
        reach = self.first - 1
        for v in range(self.first, free):
            reserved = self.buffers[v].reserved
            if reserved and (furthest := max(reserved) + self.eta) > reach:
                for place in range(reach + 1, min(furthest, free) + 1):
                    earliest[place] = v
                reach = furthest
        while (source := earliest.get(free, free)) < free:
            reserved = self.buffers[source].reserved
            # Of those that may move, one of the oldest version: the newer ones stay able to move further.
            version = min(v for v in reserved if v + self.eta >= free)
            entry = next(iter(reserved[version]))
            self.take_reserved(entry)
            self.put_reserved(entry, free)
            free = source
        return free

    def close_up(self, free: int) -> None:
        """After a deletion: moves reservations later, and then the latest occupied entry to the place left free."""
        free = self.shift_reservations(free)
        last = next((v for v in reversed(self.buffers) if v > free and self.buffers[v].occupied), None)
        if last is None:
            return
        entry, _ = self.buffers[last].occupied.popitem()
        self.put_occupied(entry, free)
        # The place at `last` stays free. The entry stood there because every earlier place was taken, and a reservation
        # before it that may stand at `last` would have moved there then.

    def check(self) -> None:
        """Raises StalenessError if an invariant is broken. O(entries)."""
        if list(self.buffers) != list(range(self.first, self.first + self.eta + 1)):
            raise StalenessError(f"buffers {list(self.buffers)} do not start at version {self.first}")
        num_entries = 0
        for v, buffer in self.buffers.items():
            reserved = list(buffer.reserved_entries())
            if len(reserved) != buffer.num_reserved or buffer.size() > self.batch_size:
                raise StalenessError(f"buffer {v} holds {buffer.size()} of {self.batch_size} entries, or miscounts")
            if any(self.version_of.get(entry) != version for entry, version in reserved):
                raise StalenessError(f"buffer {v} files a reservation under another version")
            for entry in (*buffer.occupied, *(entry for entry, _ in reserved)):
                num_entries += 1
                version = self.version_of[entry]
                if self.place_of.get(entry) != v:
                    raise StalenessError(f"entry {entry!r} is in buffer {v} and indexed in {self.place_of.get(entry)}")
                if version + self.eta < v or version > self.first:
                    raise StalenessError(f"entry {entry!r} of version {version} breaks eta {self.eta} in buffer {v}")
        if num_entries != len(self.place_of) or len(self.place_of) != len(self.version_of):
            raise StalenessError(f"{num_entries} entries in buffers, {len(self.place_of)} indexed")
