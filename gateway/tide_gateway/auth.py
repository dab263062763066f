"""Says who calls: by an API key of the database, by a static token, or, where there is neither, as the local owner.

    Authorization -> SHA-256 -> static tokens -> the table of keys in memory (read again every `FRESH_S`) -> Caller

The table is whole, so that a wrong key costs no SQL, however many come; it is read by one query at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from tide_gateway.database import StorageFailed
from tide_gateway.keys import KeyStore, KeyTable
from tide_gateway.roles import LOCAL, Caller
from tide_sdk.errors import TideError

T = TypeVar("T")

FRESH_S = 2.0
"""Seconds for which the table of keys is believed: a revocation is known to every replica after that."""
EAGER_S = 0.25
"""A key that the table does not know is looked for again if the table is older: a new key works at once."""
READ_LIMIT_S = 10.0
PATIENCE_S = 1.0
"""Seconds after which what is wanted while the database is away goes by the keys as last known."""
MAX_TOKEN_BYTES = 512
_SCHEME = b"bearer "
_NO_KEYS = KeyTable({}, ever=False)


class Owners:
    """Says who calls.

    Args:
        tokens: static token -> caller.
        store: the keys of the database; None where there is none, in tests.
        allow_anonymous: whether callers without a key may be served at all, as the owner `local` with role operator.
            They are only while there is neither a token nor, in the whole life of the database, a key.
    """

    def __init__(
        self, tokens: Mapping[str, Caller], store: KeyStore | None = None, *, allow_anonymous: bool = True
    ) -> None:
        self.store = store
        self._digests = [(hashlib.sha256(token.encode()).digest(), caller) for token, caller in tokens.items()]
        self._closed = bool(self._digests) or not allow_anonymous
        self._table = _NO_KEYS
        self._read_at_s = float("-inf")
        self._read_once = False
        self._reading: asyncio.Task[None] | None = None

    async def anonymous(self) -> bool:
        """True while callers without a key are served.

        Raises:
            TideError: 503 while the keys cannot be read.
        """
        if not self._closed:
            await self._refresh(FRESH_S)
        return not self._closed

    def at_hand(self, authorization: bytes | None) -> Caller | None:
        """What `caller` gives without a wait; None where it has to read the keys first, or refuses."""
        if self.store is not None and asyncio.get_running_loop().time() - self._read_at_s > FRESH_S:
            return None
        given = _given(authorization)
        if given is None:
            return None if self._closed else LOCAL
        found = self._static(given)
        if found is None and self.store is not None:
            found = self._table.caller(given.decode("latin-1"), self.store.now_s())
        return found

    async def caller(self, authorization: bytes | None) -> Caller:
        """The owner and role of a call.

        Args:
            authorization: the value of the header `Authorization`, None if there is none.

        Raises:
            TideError: 401 for a missing or unknown key, 503 while the keys cannot be read.
        """
        words = "send the header Authorization: Bearer KEY"
        given = _given(authorization)
        if given is not None:
            found = self._static(given) or await self._by_key(given)
            if found is not None:
                return found
            words = "the key is unknown, revoked or expired"
        if await self.anonymous():
            return LOCAL
        raise TideError("unauthorized", words)

    async def as_last_known(self, authorization: bytes | None) -> Caller:
        """As `caller`, but by the keys as they were read last where the database does not answer at once: for what is
        wanted just then. A key that was revoked since is still believed.

        Raises:
            TideError: 401; 503 where the keys were never read.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.caller(authorization)
        except TimeoutError:
            pass
        except TideError as error:
            if error.code != "unavailable":
                raise
        given = _given(authorization)
        found = None
        if given is not None and self.store is not None:
            found = self._table.caller(given.decode("latin-1"), self.store.now_s())
        if found is None and (self._closed or not self._read_once):
            raise TideError("unavailable", "the keys cannot be read now; call again", retry_after_s=1)
        return found or LOCAL

    async def for_task(self, caller: Caller, task_id: str, call: Callable[[str], Awaitable[T]]) -> T:
        """Make a call on one task as its caller, and as the task's owner where an operator asks for another's.

        Args:
            caller: who asks.
            task_id: the task.
            call: gets the owner's name, raises `not_found` for a task that is not that owner's.

        Raises:
            TideError: what `call` raises.
        """
        try:
            return await call(caller.owner)
        except TideError as error:
            if error.code != "not_found" or self.store is None or not caller.may("operator"):
                raise
            owner = await stored(self.store.owner_of(task_id))
            if owner is None or owner == caller.owner:
                raise
        return await call(owner)

    def forget(self) -> None:
        """Read the keys again before the next call: they were changed through this process."""
        self._read_at_s = float("-inf")
        self._reading = None

    def _static(self, given: bytes) -> Caller | None:
        digest = hashlib.sha256(given).digest()
        found: Caller | None = None
        # All are compared, so that the time tells nothing about which one fits.
        for known, caller in self._digests:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    async def _by_key(self, given: bytes) -> Caller | None:
        if self.store is None:
            return None
        await self._refresh(FRESH_S)
        text = given.decode("latin-1")
        found = self._table.caller(text, self.store.now_s())
        if found is None:
            await self._refresh(EAGER_S)
            found = self._table.caller(text, self.store.now_s())
        return found

    async def _refresh(self, max_age_s: float) -> None:
        """Read the table if it is older than that; callers that come meanwhile wait for the same query."""
        loop = asyncio.get_running_loop()
        if self.store is None or loop.time() - self._read_at_s <= max_age_s:
            return
        if self._reading is None or self._reading.done():
            self._reading = loop.create_task(self._read(self.store), name="tide-read-keys")
        await stored(asyncio.shield(self._reading))

    async def _read(self, store: KeyStore) -> None:
        asked_at_s = asyncio.get_running_loop().time()
        table = await store.table()
        # It never opens again, not even if somebody empties the table.
        self._closed = self._closed or table.ever
        self._read_once = True
        if self._reading is asyncio.current_task():  # else it is older than a change that this process made
            self._table = table
            self._read_at_s = asked_at_s


def _given(authorization: bytes | None) -> bytes | None:
    """The key in a header, None where there is none; one that is too long is the empty key, which nobody has."""
    if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
        return None
    given = authorization[len(_SCHEME) :].strip()
    return given if len(given) <= MAX_TOKEN_BYTES else b""


async def stored(read: Awaitable[T]) -> T:
    """What a read or write of the key store gives, within `READ_LIMIT_S`.

    Raises:
        TideError: 503, the database does not answer.
    """
    try:
        async with asyncio.timeout(READ_LIMIT_S):
            return await read
    except (StorageFailed, TimeoutError) as error:
        raise TideError("unavailable", "the keys cannot be read now; call again", retry_after_s=1) from error
