"""What goes wrong with a database, as callers see it."""

from __future__ import annotations


class DatabaseError(Exception):
    """The database cannot be used as configured; the message names the fix."""


class StorageFailed(Exception):
    """The disk or the database does not take the call now; nothing of the transaction is stored. Call again later."""


class OutcomeUnknown(StorageFailed):
    """The connection was lost while the commit was under way: the transaction is stored whole, or nothing of it is.

    Whoever calls again must find out by what it reads: a row's version, or a row that is there already.
    """
