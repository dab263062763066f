"""Large bodies: none that somebody names is ever lost to a removal, whatever the moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

import pytest

from tide_gateway.blobs import BlobStore

BIG = "x" * 20_000
DAY_S = 86400.0


def bodies(folder: Path) -> list[Path]:
    return [path for path in (folder / "blobs").glob("??/*") if path.is_file()]


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - 365 * DAY_S, time.time() - 365 * DAY_S))


@pytest.fixture
def store(tmp_path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def old_body(store: BlobStore, folder: Path) -> tuple[bytes, Path]:
    reference = store.put(BIG.encode())
    (path,) = bodies(folder)
    make_old(path)
    return reference, path


@pytest.mark.parametrize("moment", ["before it is moved", "while it is aside", "after the removal"])
def test_a_body_that_is_named_while_it_is_removed_is_there(store, tmp_path, monkeypatch, moment):
    reference, path = old_body(store, tmp_path)
    old = store.find_old(DAY_S)
    assert old.names == {path.name}
    honest = os.rename

    def rename(source, target):
        if moment == "before it is moved":
            store.put(BIG.encode())
        honest(source, target)
        if moment == "while it is aside":
            assert store.get(store.put(BIG.encode())) == BIG.encode()

    monkeypatch.setattr(os, "rename", rename)
    assert store.remove(old) == (moment != "before it is moved")
    if moment == "after the removal":
        assert bodies(tmp_path) == []
        store.put(BIG.encode())
    assert store.get(reference) == BIG.encode()
    assert bodies(tmp_path) == [path]
    assert store.find_old(DAY_S).names == set()


def test_a_removal_that_was_killed_halfway_is_undone(store, tmp_path):
    reference, path = old_body(store, tmp_path)
    path.rename(path.with_name(path.name + ".0123abcd.out"))
    assert store.get(reference) == BIG.encode(), "it is read where it lies"
    assert store.find_old(DAY_S).names == set()
    assert bodies(tmp_path) == [path]
    make_old(path)
    assert store.remove(store.find_old(DAY_S)) == 1


async def test_writers_and_removals_at_once_lose_no_body(store, tmp_path):
    over = False

    def remove() -> int:
        num_removed = 0
        while not over:
            num_removed += store.remove(store.find_old(DAY_S))
        return num_removed

    def write(number: int) -> None:
        # Each body has one writer: only a removal may take it from under it.
        body = BIG.encode() + bytes([number])
        for _ in range(300):
            reference = store.put(body)
            assert store.get(reference) == body
            with contextlib.suppress(FileNotFoundError):
                # Its rows are gone, and a day has passed.
                make_old(tmp_path / "blobs" / reference[5:7].decode() / reference[5:].decode())

    removing = [asyncio.create_task(asyncio.to_thread(remove)) for _ in range(2)]
    await asyncio.gather(*(asyncio.to_thread(write, number) for number in range(4)))
    over = True
    assert sum(await asyncio.gather(*removing)) > 0
