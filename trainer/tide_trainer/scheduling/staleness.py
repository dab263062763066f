"""Staleness buffers: which group of trajectories may train at which model version (Reserve, Occupy, Consume).

One buffer per coming train step, keyed by the version `V_buf` at which it is consumed. A group that starts is
*reserved* at the worst place that its version admits; once complete it is *occupied* at the earliest free place.

    reserve -> [reserved] -> occupy -> [occupied] -> consume (the batch) -> trained
                   |                       |            +-> surplus: redundant entries that fit no later buffer
                   +------- delete --------+            aborted (Stuck, failed) or filtered

Source: StaleFlow sections 4.1 to 4.3.
Symbols: eta = staleness bound; V_traj = an entry's version; V_buf = a buffer's version.
Invariant 2: `V_traj + eta >= V_buf` for every entry, always.
Deviation: of a buffer's redundant entries only those are aborted that have no admissible place in a later buffer; the
paper aborts all. The Stuck time is `staleness_stuck.py`.
"""

from __future__ import annotations

from tide_trainer.scheduling.staleness_places import Places
from tide_trainer.scheduling.staleness_types import (
    BuffersSnapshot,
    BufferState,
    BufferView,
    EntryChanges,
    EntryRecord,
    NoPlaceError,
    NotReadyError,
    StalenessError,
    UnknownEntryError,
)

__all__ = [
    "BufferState",
    "BufferView",
    "BuffersSnapshot",
    "EntryChanges",
    "EntryRecord",
    "NoPlaceError",
    "NotReadyError",
    "StalenessBuffers",
    "StalenessError",
    "UnknownEntryError",
]


class StalenessBuffers:
    """The buffers of the train steps `version .. version + eta`, each with places for a batch of groups.

    Cost: O(eta) looks at buffers for each operation, O(eta + batch) for `consume` (`num_looks` counts them). Not
    thread-safe; one owner calls it. An operation that raises has changed nothing.

    Attributes:
        surplus: what the last `consume` has removed beside its batch; the caller aborts it.
    """

    def __init__(self, eta: int, batch_size: int, version: int = 0, num_spare: int = 0) -> None:
        """Makes empty buffers.

        Args:
            eta: how many versions older than the consuming version a trajectory may be; 0 is on-policy.
            batch_size: groups per train step.
            version: the trainer's model version; the next buffer is consumed at it.
            num_spare: redundancy: places of each buffer beyond the batch, so that the slowest are not waited for.
        """
        lowest = {"eta": (eta, 0), "batch_size": (batch_size, 1), "version": (version, 0), "num_spare": (num_spare, 0)}
        for name, (value, least) in lowest.items():
            if value < least:
                raise StalenessError(f"{name} is {value}; it must be at least {least}")
        self._places = Places(eta, batch_size, version, num_spare)
        self.surplus: tuple[str, ...] = ()

    @property
    def eta(self) -> int:
        """The staleness bound in versions."""
        return self._places.eta

    @property
    def batch_size(self) -> int:
        """Groups per train step."""
        return self._places.batch_size

    @property
    def num_looks(self) -> int:
        """Buffers looked at and entries moved so far: what the operations cost."""
        return self._places.num_looks

    @property
    def version(self) -> int:
        """V_buf of the next buffer: the model version that the next train step starts from."""
        return self._places.first

    def __contains__(self, entry: str) -> bool:
        return entry in self._places.place_of

    def __len__(self) -> int:
        return len(self._places.place_of)

    def version_of(self, entry: str) -> int:
        """V_traj of an entry (min over its group). Raises UnknownEntryError."""
        self._known(entry)
        return self._places.version_of[entry]

    def buffer_of(self, entry: str) -> int:
        """V_buf of the place that the entry has now: others may have moved it since it was reserved."""
        return self._known(entry)

    def capacity_left(self, version: int) -> int:
        """How many further groups of this version could be reserved now; 0 for one too old or not yet trained."""
        if version > self.version:
            return 0
        places = self._places
        sizes = (places.buffers[v].size() for v in range(self.version, version + self.eta + 1))
        return sum(places.capacity - size for size in sizes)

    def can_reserve(self, version: int) -> bool:
        """Whether `reserve` at this version would find a place (the protocol's discriminator)."""
        return version <= self.version and self._places.last_free(version + self.eta) is not None

    def reserve(self, entry: str, version: int) -> int:
        """Takes the latest free place that the version admits, for a group that is about to start.

        Args:
            entry: the group's id, new here.
            version: the oldest model version that may generate any of it; at most the trainer's.

        Returns:
            V_buf of the place.

        Raises:
            NoPlaceError: nothing admissible is free; the caller holds the group back.
            StalenessError: the entry is already here, or the version is newer than the trainer's.
        """
        places = self._places
        if entry in places.place_of:
            raise StalenessError(f"entry {entry!r} is already in buffer {places.place_of[entry]}; reserve a group once")
        if version > self.version:
            raise StalenessError(f"entry {entry!r}: version {version} is newer than the trainer's {self.version}")
        place = places.last_free(version + self.eta)
        if place is None:
            raise NoPlaceError(
                f"no free place for entry {entry!r} of version {version}: buffers {self.version} to "
                f"{version + self.eta} (eta {self.eta}) are full or past; wait for consume() or use a newer version"
            )
        places.version_of[entry] = version
        places.put_reserved(entry, place)
        return place

    def occupy(self, entry: str) -> int:
        """Puts a complete, rewarded group at the earliest free place, after its reservation is deleted with moves.

        Returns:
            V_buf of the place: never later than the reservation's. A later deletion may move it further forward.

        Raises:
            UnknownEntryError: never reserved, or gone.
            StalenessError: it is occupied already.
        """
        places = self._places
        place = self._known(entry)
        if entry in places.buffers[place].occupied:
            raise StalenessError(f"entry {entry!r} is already occupied in buffer {place}; occupy a group once")
        free = places.shift_reservations(places.take_reserved(entry))
        first = places.first_wanting(free)
        place = free if first is None else first
        places.put_occupied(entry, place)
        return place

    def delete(self, entry: str) -> None:
        """Removes a reserved (aborted) or occupied (filtered) group; the others close up, so the next buffer fills.

        Reservations move to later places and occupied entries to earlier ones. Raises UnknownEntryError.
        """
        places = self._places
        place = self._known(entry)
        occupied = places.buffers[place].occupied
        if entry in occupied:
            del occupied[entry]
        else:
            places.take_reserved(entry)
        places.forget(entry)
        places.close_up(place)

    def lower(self, entry: str, version: int) -> int:
        """Notes that part of a group in flight is generated by `version`: the entry's version becomes the min.

        Returns:
            V_buf of the entry's place; it moves forward where the older version asks for it.

        Raises:
            UnknownEntryError: never reserved, or gone.
            NoPlaceError: the older version would break the bound; abort the member or generate it with a newer version.
            StalenessError: the group is complete.
        """
        places = self._places
        place = self._known(entry)
        if entry in places.buffers[place].occupied:
            raise StalenessError(f"entry {entry!r} is complete; its version cannot become {version}")
        if version >= places.version_of[entry]:
            return place
        limit = version + self.eta
        free = place if place <= limit else places.last_free(limit)
        other = places.exchange_for(place, limit) if free is None else None
        if free is None and other is None:
            raise NoPlaceError(f"entry {entry!r}: version {version} admits buffers up to {limit}, and all are full")
        places.take_reserved(entry)
        places.version_of[entry] = version
        if other is not None:
            free = places.take_reserved(other)
            places.put_reserved(other, place)
        places.put_reserved(entry, place if free is None else free)
        if other is None and free != place:
            places.close_up(place)
        return places.place_of[entry]

    def ready(self) -> bool:
        """Whether the buffer of the present version has a whole batch of complete entries."""
        return self._places.state(self.version) is BufferState.READY

    def consume(self) -> tuple[str, ...]:
        """Takes the batch of the present version, in order of completion, and moves on to the next version.

        Call it when the train step starts: from then on new groups fill later buffers. Redundant entries of the buffer
        move to later ones where their version admits it; the others are gone and stand in `surplus`.

        Raises:
            NotReadyError: the batch is not whole.
        """
        if not self.ready():
            buffer = self._places.buffers[self.version]
            raise NotReadyError(
                f"buffer {self.version} has {len(buffer.occupied)} of {self.batch_size} groups complete "
                f"and {buffer.num_reserved} in flight; ask ready() first"
            )
        entries, self.surplus = self._places.take_first()
        return entries

    def stuck(self) -> tuple[str, ...]:
        """What a Stuck next buffer waits for: its reservations; nothing in any other state."""
        if self._places.state(self.version) is not BufferState.STUCK:
            return ()
        return tuple(entry for entry, _ in self._places.buffers[self.version].reserved_entries())

    def take_changes(self) -> EntryChanges:
        """What has changed since the last call; a store that writes every answer in order holds the snapshot."""
        return self._places.take_changes()

    def states(self) -> tuple[BufferView, ...]:
        """All buffers, the next one first."""
        return tuple(
            BufferView(v, self._places.state(v), len(buffer.occupied), buffer.num_reserved)
            for v, buffer in self._places.buffers.items()
        )

    def snapshot(self) -> BuffersSnapshot:
        """The whole state as plain data, for SQL."""
        records: list[EntryRecord] = []
        for v, buffer in self._places.buffers.items():
            records += [EntryRecord(entry, self._places.version_of[entry], v, True) for entry in buffer.occupied]
            records += [EntryRecord(entry, version, v, False) for entry, version in buffer.reserved_entries()]
        num_spare = self._places.capacity - self.batch_size
        return BuffersSnapshot(self.eta, self.batch_size, self.version, tuple(records), num_spare)

    @classmethod
    def restore(cls, snapshot: BuffersSnapshot) -> StalenessBuffers:
        """Rebuilds a snapshot's state. Raises StalenessError if it breaks an invariant (an entry too old, ...)."""
        restored = cls(snapshot.eta, snapshot.batch_size, snapshot.version, snapshot.num_spare)
        places = restored._places
        for record in snapshot.entries:
            if record.buffer not in places.buffers or record.entry in places.place_of:
                raise StalenessError(
                    f"snapshot: entry {record.entry!r} is there twice, or its buffer {record.buffer} is not one of "
                    f"{snapshot.version} to {snapshot.version + snapshot.eta}"
                )
            if record.version + snapshot.eta < record.buffer:
                raise StalenessError(
                    f"snapshot: entry {record.entry!r} of version {record.version} breaks eta {snapshot.eta} "
                    f"in buffer {record.buffer}"
                )
            places.version_of[record.entry] = record.version
            put = places.put_occupied if record.occupied else places.put_reserved
            put(record.entry, record.buffer)
        places.check()
        return restored

    def check(self) -> None:
        """Raises StalenessError if an invariant is broken. O(entries); for tests, restore and idle moments."""
        self._places.check()

    def _known(self, entry: str) -> int:
        place = self._places.place_of.get(entry)
        if place is None:
            raise UnknownEntryError(f"entry {entry!r} is in no buffer: not reserved, consumed or deleted")
        return place
