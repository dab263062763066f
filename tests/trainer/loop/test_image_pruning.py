"""A run's folder of images stays as large as the work in flight."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time

from loop_fakes import ScriptedRunner, trajectory

from tide_trainer import image_files
from tide_trainer.images import ImageStore
from tide_trainer.loop.image_pruning import MARGIN_S, ImagePruning
from tide_trainer.loop.prompts import PromptSource
from tide_trainer.loop.rollout import Rollout
from tide_trainer.report.recording_file import RecordingFiles


def aged(store: ImageStore, data: bytes, put_s: float) -> str:
    digest = store.put(data)
    os.utime(store.path(digest), (put_s, put_s))
    return digest


def held(store: ImageStore) -> set[str]:
    return {path.name for path in store.folder.iterdir()}


async def none_recorded() -> set[str]:
    return set()


async def test_images_put_before_all_work_in_flight_go_and_the_others_stay(tmp_path):
    store = ImageStore(tmp_path)
    old, kept, needed = aged(store, b"old", 100.0), aged(store, b"parity", 100.0), aged(store, b"needed", 500.0)
    oldest = [lambda: 500.0 + MARGIN_S, lambda: None, lambda: 900.0]
    pruning = ImagePruning(store, oldest, none_recorded, frozenset({kept}), now=lambda: 5000.0)
    assert await pruning.prune() == 1
    assert held(store) == {kept, needed}
    assert old not in held(store)
    # With nothing in flight only what is young stays: the clock may have been set.
    young = aged(store, b"young", 5000.0 - MARGIN_S)
    assert await ImagePruning(store, [lambda: None], none_recorded, now=lambda: 5000.0).prune() == 2
    assert held(store) == {young}


async def test_an_image_that_comes_again_is_young_again(tmp_path):
    store = ImageStore(tmp_path)
    digest = aged(store, b"again", 100.0)
    before_s = time.time() - 5
    assert store.put(b"again") == digest
    assert store.prune(before_s, ()) == (0, 0)
    assert store.read(digest) == b"again"


async def test_nothing_goes_while_it_is_not_known_what_is_recorded(tmp_path):
    store = ImageStore(tmp_path)
    aged(store, b"old", 100.0)

    async def unknown() -> None:
        return None

    assert await ImagePruning(store, [], unknown).prune() == 0
    assert len(held(store)) == 1


async def test_a_folder_that_is_not_there_or_refuses_ends_no_run(tmp_path, monkeypatch, caplog):
    assert await ImagePruning(ImageStore(tmp_path / "none"), [], none_recorded).prune() == 0
    monkeypatch.setattr(image_files, "prune", lambda *_: (_ for _ in ()).throw(OSError("read-only")))
    assert await ImagePruning(ImageStore(tmp_path), [], none_recorded).prune() == 0
    assert "cannot be removed: read-only" in caplog.text


def test_an_image_that_is_put_while_others_are_removed_is_there_afterwards(tmp_path):
    store = ImageStore(tmp_path)
    images = [b"image %d" % number for number in range(20)]
    lost: list[bytes] = []
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            store.prune(1000.0, ())

    pruner = threading.Thread(target=prune)
    pruner.start()
    for _ in range(40):
        for data in images:
            with contextlib.suppress(FileNotFoundError):  # gone before it could be made old
                aged(store, data, 1.0)
            digest = store.put(data)
            if not store.path(digest).is_file():
                lost.append(data)
    stop.set()
    pruner.join()
    assert lost == []


async def test_a_group_holds_its_images_from_its_beginning_until_it_is_trained_or_dropped(settings, repository):
    go = asyncio.Event()

    class Waiting(ScriptedRunner):
        async def run(self, *arguments, **named):
            await go.wait()
            return await super().run(*arguments, **named)

    runner = Waiting(lambda _p, group, member, _a: trajectory(group, member, reward=float(member)))
    begun = itertools.count(1000)
    parts = (runner, PromptSource(settings.tasks), repository, settings.algorithm, settings.agent)
    rollout = Rollout(*parts, unix_s=lambda: float(next(begun)))
    assert rollout.oldest_s() is None
    rollout.open()
    assert rollout.oldest_s() == 1000.0
    go.set()
    _, groups = await asyncio.wait_for(rollout.next_batch(), 10)
    consumed = {int(group.uid.removeprefix("train/")) for group in groups}
    waiting = next(number for number in itertools.count() if number not in consumed)
    assert rollout.oldest_s() == 1000.0 + waiting, "what is consumed is let go; the oldest of the others counts"
    await rollout.close()


def test_recorded_trajectories_name_the_images_that_they_show(tmp_path, prompt):
    store = ImageStore(tmp_path / "images")
    files = RecordingFiles(tmp_path / "trajectories", store, "run", str, 1 << 20)
    digest = store.put(b"shown")
    url = f"tide-blob:sha256:{digest}?type=image/png"
    said = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    found = trajectory()
    files.write(
        prompt,
        type(found)(**{name: getattr(found, name) for name in found.__dataclass_fields__} | {"messages": (said,)}),
        {"kind": "train", "attempt": 0, "temperature": 1.0, "started_at": "", "turns": (), "events": (),
         "earlier_attempts": (), "duration_s": 1.0, "end_version": 0},
    )  # fmt: skip
    assert files.images == {digest}
