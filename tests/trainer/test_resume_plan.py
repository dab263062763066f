"""What a run that goes on makes of the rows, payloads and checkpoint that it finds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from loop_fakes import ScriptedRunner, trajectory

from tide_trainer import resume
from tide_trainer.backends import whole_files
from tide_trainer.errors import ConfigurationError
from tide_trainer.loop.prompts import PromptSource
from tide_trainer.loop.rollout import Rollout
from tide_trainer.persistence.migrate import async_url, migrate_database
from tide_trainer.persistence.repository import ENDED_FIRST, RunRepository
from tide_trainer.persistence.resume import StoredGroup, StoredRun, read_run
from tide_trainer.run_directory import RunDirectory, new_run_directory, run_to_resume
from tide_trainer.scheduling.staleness_types import EntryRecord
from tide_trainer.settings import TrainerSettings


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return TrainerSettings.model_validate(
        {
            "run": {"directory": str(tmp_path / "runs")},
            "tasks": {"environment": "toy"},
            "rollout": {"engine": "fake"},
            "train": {"backend": "fake"},
            "algorithm": {"groups_per_batch": 4, "group_size": 2, "eta": 1},
        }
    )


def group(index: int, status: str, version: int, buffer: int | None = None, reason: str | None = None, sampling=0):
    payload = None if status in ("running", "waiting") else f"p{index}"
    return StoredGroup(f"train/{index}", status, reason, version, buffer, payload, sampling)


def planned(settings, groups, version, *, tokens=None, entries=(), read=None, model_version=9):
    stored = StoredRun("running", model_version, {}, "toy.abc", 0, tuple(groups), tuple(entries))

    def payload(digest):
        return [trajectory(f"train/{digest[1:]}", member, version=(tokens or {}).get(digest, 0)) for member in (0, 1)]

    return resume.plan(stored, ("checkpoint", version), settings, read or payload, lambda _: True)


def test_t1_resumed_at_version_7_with_eta_1_never_more_than_two_batches_are_admitted(settings):
    trained = [group(k, "trained", 6, 6) for k in range(28)]
    ready = [group(28 + k, "ready", 7) for k in range(3)]
    running = [group(31 + k, "running", 7) for k in range(5)]
    found = planned(settings, [*trained, *ready, *running], 7)
    assert found.buffers.version == 7
    assert len(found.buffers) == 3
    more = 0
    while found.buffers.can_reserve(7):
        found.buffers.reserve(f"new{more}", 7)
        more += 1
    assert len(found.buffers) == 2 * settings.algorithm.groups_per_batch
    assert found.position == 36


def test_groups_trained_after_the_checkpoint_are_complete_again_and_those_before_it_stay(settings):
    groups = [group(0, "trained", 3, 4), group(1, "trained", 4, 5), group(2, "trained", 5, 6), group(3, "ready", 5)]
    found = planned(settings, groups, 5, tokens={"p2": 5, "p3": 5})
    assert [one.uid for one in found.groups] == ["train/1", "train/2", "train/3"]
    assert found.num_lost_steps == 4
    # The oldest first: it has the fewest places.
    assert found.buffers.states()[0].num_occupied == 3
    found.buffers.check()


def test_groups_with_tokens_of_lost_versions_are_sampled_again_under_a_further_sampling(settings):
    found = planned(settings, [group(0, "ready", 5), group(1, "trained", 5, 6)], 5, tokens={"p0": 6, "p1": 5})
    assert [(draw.prompt.uid, draw.sampling) for draw in found.again] == [("train/0", 1)]
    assert "versions above 5" in found.reasons["train/0"]
    assert [one.uid for one in found.groups] == ["train/1"]


def test_prompts_in_flight_waiting_or_without_a_row_are_sampled_again_first_and_once(settings):
    groups = [
        group(0, "running", 0),
        group(1, "waiting", 0, reason="stuck", sampling=2),
        group(2, "dropped", 0, reason="equal rewards"),
        group(4, "dropped", 0, reason=ENDED_FIRST),
    ]
    found = planned(settings, groups, 0)
    # 3 was taken and its row never written; 4 was complete when the run was stopped.
    assert [(one.prompt.uid, one.sampling) for one in found.again] == [("train/0", 1), ("train/1", 2), ("train/3", 0)]
    assert [one.uid for one in found.groups] == ["train/4"]
    source = PromptSource(settings.tasks, found.position, found.again)
    assert [source.take(0).prompt.uid for _ in range(4)] == ["train/0", "train/1", "train/3", "train/5"]


def test_t3_what_is_too_old_for_the_bound_is_sampled_again(settings):
    found = planned(settings, [group(0, "ready", 3)], 5)
    assert found.groups == ()
    assert "staleness bound" in found.reasons["train/0"]


def test_the_entrys_version_counts_where_it_is_older_than_the_tokens(settings):
    found = planned(settings, [group(0, "ready", 5)], 5, entries=[EntryRecord("train/0", 4, 5, True)])
    assert found.buffers.version_of("train/0") == 4


def test_a_payload_that_is_lost_is_sampled_again(settings, tmp_path):
    payloads = RunRepository("sqlite+aiosqlite://", "run", tmp_path).payloads
    found = planned(settings, [group(0, "ready", 0)], 0, read=payloads.read)
    assert "cannot be read" in found.reasons["train/0"]


async def test_a_rollout_that_goes_on_trains_every_prompt_once_and_again_after_a_second_crash(settings, tmp_path):
    """Lives that end without a word; after each, the rows and payloads are all that is left."""
    directory = new_run_directory(settings.run)
    migrate_database(directory.database_url("trainer"))
    versions = [0]
    hanging = asyncio.get_running_loop().create_future()

    def script(prompt, uid, member, attempt):
        slow = int(uid.rpartition("/")[2]) % 3 == 0 and attempt == 0
        return asyncio.shield(hanging) if slow else trajectory(uid, member, float(member), version=versions[0])

    seen: list[int] = []
    for life in range(3):
        repository = RunRepository(async_url(directory.database_url("trainer")), "run", directory.payloads)
        runner = ScriptedRunner(script)
        source = PromptSource(settings.tasks)
        if life == 0:
            await repository.open_run(settings.model_dump(mode="json", exclude_none=True), 0.0)
            rollout = Rollout(runner, source, repository, settings.algorithm, settings.agent)
        else:
            found = await resume.resume(settings, directory, repository)
            versions[0] = found.version
            source = PromptSource(settings.tasks, found.position, found.again)
            rollout = Rollout(runner, source, repository, settings.algorithm, settings.agent)
            rollout.restore(found.buffers, found.draws, found.groups)
            seen.append(len(found.groups))
        rollout.open()
        async with asyncio.timeout(20):
            version, groups = await rollout.next_batch()
        await repository.add_train_step([one.uid for one in groups], version, {}, 1.0)
        _save(directory, version + 1 if life == 1 else 0)
        await rollout.close()
        await repository.close()
    assert seen[0] >= 4  # the train step of the first life is lost: its groups are complete again
    repository = RunRepository(async_url(directory.database_url("trainer")), "run", directory.payloads)
    stored = await read_run(repository.engine, "run")
    await repository.close()
    trained = [one for one in stored.groups if one.status == "trained"]
    assert {(one.buffer_version) for one in trained} == {0, 1}
    assert len(trained) == 8
    assert len({one.uid for one in stored.groups}) == len(stored.groups)
    assert stored.num_resumes == 2


def _save(directory: RunDirectory, version: int) -> None:
    if not version:
        return
    folder = directory.checkpoint
    folder.mkdir(exist_ok=True)
    (folder / whole_files.STATE_JSON).write_text(json.dumps({"format": whole_files.FORMAT, "version": version}))
    for name in (whole_files.WEIGHTS, whole_files.STATE_TENSORS, whole_files.EXTRA_JSON):
        (folder / name).write_bytes(b"{}")


def test_r2_a_checkpoint_that_is_not_whole_leaves_the_one_before_it(tmp_path):
    directory = RunDirectory("run", tmp_path)
    assert whole_files.newest_whole(str(directory.checkpoint)) is None
    _save(directory, 4)
    directory.checkpoint.rename(tmp_path / "checkpoint.previous")
    _save(directory, 6)
    assert whole_files.newest_whole(str(directory.checkpoint)) == (str(tmp_path / "checkpoint"), 6)
    (directory.checkpoint / whole_files.STATE_TENSORS).unlink()
    assert whole_files.newest_whole(str(directory.checkpoint)) == (str(tmp_path / "checkpoint.previous"), 4)


async def test_a_checkpoint_newer_than_the_rows_and_changed_prompts_are_refused(settings):
    directory = new_run_directory(settings.run)
    migrate_database(directory.database_url("trainer"))
    repository = RunRepository(async_url(directory.database_url("trainer")), "run", directory.payloads)
    with pytest.raises(ConfigurationError, match="no run that began"):
        await resume.resume(settings, directory, repository)
    await repository.open_run(settings.model_dump(mode="json", exclude_none=True), 0.0)
    other = settings.model_copy(update={"tasks": settings.tasks.model_copy(update={"train_seed": 5_000_000})})
    with pytest.raises(ConfigurationError, match=r"tasks\.train_seed: is 5000000 and was 1000000"):
        await resume.resume(other, directory, repository)
    _save(directory, 3)
    with pytest.raises(ConfigurationError, match="of version 3, the database knows 0"):
        await resume.resume(settings, directory, repository)
    await repository.close()


def test_r3_a_fresh_run_gets_a_folder_of_its_own_and_only_a_named_run_goes_on(settings, tmp_path, monkeypatch):
    first = new_run_directory(settings.run)
    (first.path / "config.toml").write_text("")
    assert new_run_directory(settings.run).path != first.path
    monkeypatch.chdir(tmp_path)
    assert run_to_resume("run") == run_to_resume(str(first.path)) == first
    with pytest.raises(ConfigurationError, match="'other' is no run's folder"):
        run_to_resume("other")


def test_a_run_that_is_alive_is_not_resumed(settings):
    directory = new_run_directory(settings.run)
    with directory.held(), pytest.raises(ConfigurationError, match="is in use"), directory.held():
        pass
    with directory.held():
        pass
