"""Where the entries of the staleness buffers stand, and how they move when one is deleted (StaleFlow section 4.2).

Cost: each operation looks at each buffer a fixed number of times and moves at most one entry a buffer: O(eta), and
O(eta + batch) for a consume. `num_looks` counts it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tide_trainer.scheduling.staleness_types import BufferState, EntryChanges, EntryRecord, StalenessError


class Buffer:
    """The entries of one coming train step; reservations are kept by version.

    `versions` has bit k set where a reservation of version `lowest + k` is here, so that the newest, and the oldest
    above a bound, are found without looking at the others.
    """

    __slots__ = ("lowest", "num_reserved", "occupied", "reserved", "versions")

    def __init__(self, lowest: int) -> None:
        self.lowest = lowest
        self.versions = 0
        self.occupied: dict[str, None] = {}
        self.reserved: dict[int, dict[str, None]] = {}
        self.num_reserved = 0

    def size(self) -> int:
        """Entries of both kinds."""
        return len(self.occupied) + self.num_reserved

    def add(self, entry: str, version: int) -> None:
        """Files a reservation."""
        self.reserved.setdefault(version, {})[entry] = None
        self.versions |= 1 << (version - self.lowest)
        self.num_reserved += 1

    def remove(self, entry: str, version: int) -> None:
        """Takes a reservation out."""
        same = self.reserved[version]
        del same[entry]
        if not same:
            del self.reserved[version]
            self.versions &= ~(1 << (version - self.lowest))
        self.num_reserved -= 1

    def newest(self) -> int:
        """The newest version of a reservation; one below the lowest without any."""
        return self.lowest + self.versions.bit_length() - 1

    def oldest_from(self, version: int) -> int | None:
        """The oldest version of a reservation that is at least `version`."""
        shift = max(0, version - self.lowest)
        left = self.versions >> shift
        return self.lowest + shift + (left & -left).bit_length() - 1 if left else None

    def reserved_entries(self) -> Iterator[tuple[str, int]]:
        """The reservations with their versions."""
        for version, same in self.reserved.items():
            for entry in same:
                yield entry, version


class Places:
    """The buffers `first .. first + eta` with `capacity` places each; every entry's version and place.

    A buffer is Ready with `batch_size` occupied entries; the capacity is that and the redundancy. After every operation
    of `StalenessBuffers` two things hold: no reservation could stand in a later free place (they wait as late as they
    may), and no occupied entry stands behind a free place of a buffer that is not Ready (training starts early).
    """

    def __init__(self, eta: int, batch_size: int, first: int, num_spare: int = 0) -> None:
        self.eta = eta
        self.batch_size = batch_size
        self.capacity = batch_size + num_spare
        self.first = first
        self.buffers = {v: Buffer(v - eta) for v in range(first, first + eta + 1)}
        self.version_of: dict[str, int] = {}
        self.place_of: dict[str, int] = {}
        self.num_looks = 0
        self._changed: dict[str, None] = {}

    def put_reserved(self, entry: str, place: int) -> None:
        """Files a reservation under its version."""
        self.num_looks += 1
        self.buffers[place].add(entry, self.version_of[entry])
        self.place_of[entry] = place
        self._changed[entry] = None

    def put_occupied(self, entry: str, place: int) -> None:
        """Files a complete entry, after those that completed before it."""
        self.num_looks += 1
        self.buffers[place].occupied[entry] = None
        self.place_of[entry] = place
        self._changed[entry] = None

    def take_reserved(self, entry: str) -> int:
        """Removes a reservation from its buffer and returns V_buf of the place that is free now."""
        self.num_looks += 1
        place = self.place_of[entry]
        self.buffers[place].remove(entry, self.version_of[entry])
        return place

    def forget(self, entry: str) -> None:
        """Drops what is known of an entry that was taken from its buffer."""
        del self.version_of[entry], self.place_of[entry]
        self._changed[entry] = None

    def take_first(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Drops the first buffer and opens a new last one.

        Returns:
            The batch in order of completion, and the surplus: what stood here beyond it and has no admissible place in
            a later buffer. Both are forgotten. Raises StalenessError if one of the batch is older than the bound.
        """
        buffer = self.buffers[self.first]
        entries = list(buffer.occupied)
        batch, complete = entries[: self.batch_size], entries[self.batch_size :]
        for entry in batch:
            if self.version_of[entry] + self.eta < self.first:
                raise StalenessError(f"entry {entry!r} breaks the staleness bound {self.eta}: a fault in this module")
        for entry in batch:
            self.forget(entry)
        self.num_looks += len(batch)
        del self.buffers[self.first]
        self.first += 1
        self.buffers[self.first + self.eta] = Buffer(self.first)
        return tuple(batch), (*self._carry_complete(complete), *self._carry_reserved(buffer))

    def _carry_complete(self, entries: list[str]) -> list[str]:
        """Moves complete entries to the earliest places that are free and admissible; returns those without one."""
        left: list[str] = []
        free = self.first
        for entry in entries:
            limit = self.version_of[entry] + self.eta
            while free <= limit and self.buffers[free].size() >= self.capacity:
                free += 1
                self.num_looks += 1
            if free <= limit:
                self.put_occupied(entry, free)
            else:
                self.forget(entry)
                left.append(entry)
        return left

    def _carry_reserved(self, buffer: Buffer) -> list[str]:
        """Moves reservations to the latest places that are free and admissible, the newest first."""
        left: list[str] = []
        free = self.first + self.eta
        for version in sorted(buffer.reserved, reverse=True):
            for entry in buffer.reserved[version]:
                free = min(free, version + self.eta)
                while free >= self.first and self.buffers[free].size() >= self.capacity:
                    free -= 1
                    self.num_looks += 1
                if free >= self.first:
                    self.put_reserved(entry, free)
                else:
                    self.forget(entry)
                    left.append(entry)
        return left

    def state(self, place: int) -> BufferState:
        """Waiting, Ready or Stuck."""
        buffer = self.buffers[place]
        if len(buffer.occupied) >= self.batch_size:
            return BufferState.READY
        return BufferState.STUCK if buffer.size() >= self.capacity else BufferState.WAITING

    def first_wanting(self, limit: int) -> int | None:
        """The earliest buffer before `limit` with a free place that is not Ready."""
        for v in range(self.first, limit):
            self.num_looks += 1
            if self.state(v) is BufferState.WAITING:
                return v
        return None

    def last_free(self, limit: int) -> int | None:
        """The latest buffer up to `limit` with a free place."""
        for v in range(limit, self.first - 1, -1):
            self.num_looks += 1
            if self.buffers[v].size() < self.capacity:
                return v
        return None

    def exchange_for(self, place: int, limit: int) -> str | None:
        """A reservation in a buffer up to `limit` that could stand at `place` instead."""
        for v in range(self.first, limit + 1):
            self.num_looks += 1
            version = self.buffers[v].oldest_from(place - self.eta)
            if version is not None:
                return next(iter(self.buffers[v].reserved[version]))
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
            self.num_looks += 1
            furthest = self.buffers[v].newest() + self.eta
            if self.buffers[v].versions and furthest > reach:
                for place in range(reach + 1, min(furthest, free) + 1):
                    self.num_looks += 1
                    earliest[place] = v
                reach = furthest
        while (source := earliest.get(free, free)) < free:
            # Of those that may move, one of the oldest version: the newer ones stay able to move further.
            version = self.buffers[source].oldest_from(free - self.eta)
            assert version is not None
            entry = next(iter(self.buffers[source].reserved[version]))
            self.take_reserved(entry)
            self.put_reserved(entry, free)
            free = source
        return free

    def close_up(self, free: int) -> None:
        """After a deletion: moves reservations later, and then the latest occupied entry to the place left free."""
        free = self.shift_reservations(free)
        if self.state(free) is BufferState.READY:
            return
        for v in range(self.first + self.eta, free, -1):
            self.num_looks += 1
            if self.buffers[v].occupied:
                entry, _ = self.buffers[v].occupied.popitem()
                self.put_occupied(entry, free)
                # The place at v stays free. The entry stood there because every earlier place was taken, and a
                # reservation before it that may stand at v would have moved there then.
                return

    def record(self, entry: str) -> EntryRecord:
        """One entry as it is."""
        place = self.place_of[entry]
        return EntryRecord(entry, self.version_of[entry], place, entry in self.buffers[place].occupied)

    def take_changes(self) -> EntryChanges:
        """What has changed since the last call, each entry once."""
        changed, self._changed = self._changed, {}
        put = tuple(self.record(entry) for entry in changed if entry in self.place_of)
        return EntryChanges(put, tuple(entry for entry in changed if entry not in self.place_of))

    def check(self) -> None:
        """Raises StalenessError if an invariant is broken. O(entries)."""
        if list(self.buffers) != list(range(self.first, self.first + self.eta + 1)):
            raise StalenessError(f"buffers {list(self.buffers)} do not start at version {self.first}")
        num_entries = 0
        for v, buffer in self.buffers.items():
            reserved = list(buffer.reserved_entries())
            if len(reserved) != buffer.num_reserved or buffer.size() > self.capacity:
                raise StalenessError(f"buffer {v} holds {buffer.size()} of {self.capacity} entries, or miscounts")
            if any(self.version_of.get(entry) != version for entry, version in reserved):
                raise StalenessError(f"buffer {v} files a reservation under another version")
            if buffer.versions != sum(1 << (version - buffer.lowest) for version in buffer.reserved):
                raise StalenessError(f"buffer {v} does not know which versions it holds")
            for entry in (*buffer.occupied, *(entry for entry, _ in reserved)):
                num_entries += 1
                version = self.version_of[entry]
                if self.place_of.get(entry) != v:
                    raise StalenessError(f"entry {entry!r} is in buffer {v} and indexed in {self.place_of.get(entry)}")
                if version + self.eta < v or version > self.first:
                    raise StalenessError(f"entry {entry!r} of version {version} breaks eta {self.eta} in buffer {v}")
        if num_entries != len(self.place_of) or len(self.place_of) != len(self.version_of):
            raise StalenessError(f"{num_entries} entries in buffers, {len(self.place_of)} indexed")
