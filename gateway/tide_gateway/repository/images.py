"""Which images the tasks of an owner show, and their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from sqlalchemy import Connection, select

from tide_gateway.blobs import BlobStore
from tide_gateway.database import Database
from tide_gateway.models import TaskImageRow, TaskRow


class ImageRows:
    """Reads images. They are written with the observations that show them (`write_group`).

    Args:
        database: where the tables are.
        blobs: where the bytes are.
    """

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs

    async def known(self, owner: str | None, digests: Collection[str]) -> set[str]:
        """Those of the digests that some task of the owner shows; owner None asks for everyone's tasks.

        Raises:
            StorageFailed: they could not be read.
        """
        found = select(TaskImageRow.digest).where(TaskImageRow.digest.in_(digests)).distinct()
        if owner is not None:
            found = found.join(TaskRow, TaskRow.task_id == TaskImageRow.task_id).where(TaskRow.owner == owner)

        def read(connection: Connection) -> set[str]:
            return set(connection.execute(found).scalars())

        return await self._database.read(read)

    async def bytes_of(self, digest: str) -> bytes:
        """The bytes of a known image, read in a thread.

        Raises:
            FileNotFoundError: its file was removed.
        """
        return await asyncio.to_thread(self._blobs.read, digest)
