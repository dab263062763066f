"""API keys and owners: their SQL, and how a key is written.

A key is `tide_KEYID_SECRET`. The table keeps the SHA-256 of the secret, which is 32 random bytes: nobody guesses those,
so that a slow hash would only make each call slow. Times are wall-clock seconds; 0 is "never" in `expires_s` and
`revoked_s`. A revoked key's row stays, so that a gateway that ever had a key never again lets in callers without one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from sqlalchemy import ColumnElement, Connection, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from tide_gateway.database import Database, StorageFailed
from tide_gateway.models import InstanceRow, KeyRow, OwnerRow, TaskRow
from tide_gateway.roles import ROLES, Caller, Role
from tide_gateway.specs import NAME

T = TypeVar("T")

MAX_KEYS = 10_000
"""Valid keys at once: every replica holds them all in memory."""
MAX_LABEL_CHARS = 128
MAX_LIFETIME_S = 3650 * 24 * 3600.0
MAX_TASKS = 2**31 - 1
_SECRET_BYTES = 32
_FORM = re.compile(r"tide_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]*")
_NO_MATCH = b"\0" * 32


class KeyRefused(ValueError):
    """A key or an owner cannot be made or changed as asked; the message names the field and the fix."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key as it may be shown: everything but the secret."""

    key_id: str
    owner: str
    role: Role
    label: str
    created_s: float
    expires_s: float
    revoked_s: float


@dataclass(frozen=True, slots=True)
class OwnerLimit:
    """An owner's limit of tasks at once over all environments, 0 for none."""

    owner: str
    max_tasks: int


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    caller: Caller
    expires_s: float


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All valid keys at one moment.

    Attributes:
        known: by key id.
        ever: True if the table has a row, also a revoked or an expired one.
    """

    known: Mapping[str, _Known]
    ever: bool

    def caller(self, text: str, now_s: float) -> Caller | None:
        """Whose key this is, None for a wrong, revoked or expired one; as long for one as for the other."""
        form = _FORM.fullmatch(text)
        key_id, secret = form.groups() if form else ("", "")
        known = self.known.get(key_id)
        fits = secrets.compare_digest(_digest(secret), known.digest if known is not None else _NO_MATCH)
        if known is None or not fits or 0 < known.expires_s <= now_s:
            return None
        return known.caller


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class KeyStore:
    """Reads and writes keys and owners; used by all replicas on one database.

    Args:
        database: the migrated database.
        now_s: the wall clock, seconds.
    """

    def __init__(self, database: Database, now_s: Callable[[], float] = time.time) -> None:
        self._database = database
        self.now_s = now_s

    async def table(self) -> KeyTable:
        """All keys that are valid now.

        Raises:
            StorageFailed: the database cannot be read.
        """
        return await self._read(lambda connection: _read_table(connection, self.now_s()))

    async def create(
        self, owner: str, role: Role, *, label: str = "", lifetime_s: float | None = None
    ) -> tuple[str, Key]:
        """Make a key; its text is given here and never again.

        Args:
            owner: whose tasks it is for; need not exist.
            role: what it may do.
            label: words for people.
            lifetime_s: seconds until it expires, None for never.

        Raises:
            KeyRefused: a field is wrong, or there are `MAX_KEYS` valid ones.
            StorageFailed: it was not stored.
        """
        _check_owner(owner)
        if role not in ROLES:
            raise KeyRefused(f"role: must be one of {', '.join(ROLES)}")
        if len(label) > MAX_LABEL_CHARS or not _PRINTABLE.fullmatch(label):
            raise KeyRefused(f"label: at most {MAX_LABEL_CHARS} characters, and no control characters")
        if lifetime_s is not None and not 0 < lifetime_s <= MAX_LIFETIME_S:
            raise KeyRefused(f"lifetime: above 0 and at most {MAX_LIFETIME_S / 86400:g} days; leave it out for none")
        now_s = self.now_s()
        expires_s = 0.0 if lifetime_s is None else now_s + lifetime_s
        key = Key(secrets.token_hex(4), owner, role, label, now_s, expires_s, 0.0)
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        await self._write(lambda connection: _insert(connection, key, _digest(secret).hex(), now_s))
        return f"tide_{key.key_id}_{secret}", key

    async def keys(self) -> list[Key]:
        """All keys, the newest first; revoked and expired ones too."""
        query = select(*_shown()).order_by(KeyRow.created_s.desc(), KeyRow.key_id).limit(2 * MAX_KEYS)
        return await self._read(lambda connection: [_key(row) for row in connection.execute(query)])

    async def revoke(self, key_id: str) -> Key | None:
        """Make a key invalid for ever, on every replica within seconds. Repeating it keeps the first moment.

        Returns:
            The key, None if there is no such one.
        """
        now_s = self.now_s()

        def change(connection: Connection) -> Key | None:
            which = KeyRow.key_id == key_id
            connection.execute(update(KeyRow).where(which, KeyRow.revoked_s == 0.0).values(revoked_s=now_s))
            row = connection.execute(select(*_shown()).where(which)).one_or_none()
            return None if row is None else _key(row)

        return await self._write(change) if re.fullmatch("[0-9a-f]{8}", key_id) else None

    async def owners(self) -> list[OwnerLimit]:
        """All owners that have a limit, by name."""
        query = select(OwnerRow.owner, OwnerRow.max_tasks).order_by(OwnerRow.owner)
        return await self._read(lambda connection: [OwnerLimit(*row) for row in connection.execute(query)])

    async def set_owner(self, owner: str, max_tasks: int) -> OwnerLimit:
        """Set how many tasks an owner may have at once, 0 for any number. Safe to repeat.

        Raises:
            KeyRefused: a field is wrong.
        """
        _check_owner(owner)
        if not 0 <= max_tasks <= MAX_TASKS:
            raise KeyRefused(f"max_tasks: from 0 (no limit) to {MAX_TASKS}")

        def change(connection: Connection) -> None:
            known = update(OwnerRow).where(OwnerRow.owner == owner).values(max_tasks=max_tasks)
            if connection.execute(known).rowcount == 0:
                row = {"owner": owner, "max_tasks": max_tasks, "created_s": self.now_s()}
                connection.execute(insert(OwnerRow).values(row))

        try:
            await self._write(change)
        except IntegrityError:
            # Another replica made the row in between: now it is there to be changed.
            await self._write(change)
        return OwnerLimit(owner, max_tasks)

    async def owner_of(self, task_id: str) -> str | None:
        """The owner of a task, None if there is no such task."""
        query = select(TaskRow.owner).where(TaskRow.task_id == task_id)
        return await self._read(lambda connection: connection.execute(query).scalar_one_or_none())

    async def has_instance(self, environment: str, name: str) -> bool:
        """True if there is a row of this environment server."""
        query = select(InstanceRow.name).where(InstanceRow.name == name, InstanceRow.environment == environment)
        return await self._read(lambda connection: connection.execute(query).one_or_none() is not None)

    async def _read(self, fn: Callable[[Connection], T]) -> T:
        try:
            return await self._database.read(fn)
        except SQLAlchemyError as error:
            raise StorageFailed(str(getattr(error, "orig", None) or error)) from error

    async def _write(self, fn: Callable[[Connection], T]) -> T:
        try:
            return await self._database.write(fn)
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise StorageFailed(str(getattr(error, "orig", None) or error)) from error


def _check_owner(owner: str) -> None:
    if not NAME.fullmatch(owner):
        raise KeyRefused(
            "owner: letters, digits, dot, dash and underscore, at most 64, beginning with a letter or digit"
        )


def _valid(now_s: float) -> tuple[ColumnElement[bool], ...]:
    return KeyRow.revoked_s == 0.0, or_(KeyRow.expires_s == 0.0, KeyRow.expires_s > now_s)


def _insert(connection: Connection, key: Key, digest: str, now_s: float) -> None:
    count = connection.execute(select(func.count()).select_from(KeyRow).where(*_valid(now_s))).scalar_one()
    if count >= MAX_KEYS:
        raise KeyRefused(f"there are {count} valid keys already, revoke some first")
    row = {name: getattr(key, name) for name in Key.__dataclass_fields__} | {"digest": digest}
    connection.execute(insert(KeyRow).values(row))


def _read_table(connection: Connection, now_s: float) -> KeyTable:
    columns = (KeyRow.key_id, KeyRow.digest, KeyRow.owner, KeyRow.role, KeyRow.expires_s)
    rows = connection.execute(select(*columns).where(*_valid(now_s)).limit(2 * MAX_KEYS)).all()
    ever = bool(rows) or connection.execute(select(KeyRow.key_id).limit(1)).first() is not None
    known = {
        key_id: _Known(bytes.fromhex(digest), Caller(owner, cast("Role", role)), expires_s)
        for key_id, digest, owner, role, expires_s in rows
        # A role that this version does not know may do nothing.
        if role in ROLES
    }
    return KeyTable(known, ever)


def _shown() -> tuple[Any, ...]:
    return tuple(getattr(KeyRow, name) for name in Key.__dataclass_fields__)


def _key(row: Any) -> Key:
    return Key(*row)
