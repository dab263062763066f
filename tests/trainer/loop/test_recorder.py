from __future__ import annotations

import asyncio
import time

import pytest
from loop_fakes import trajectory

from tide_trainer.images import ImageStore
from tide_trainer.loop import recorder as recorder_module
from tide_trainer.loop.recorder import TrajectoryRecorder
from tide_trainer.loop.recording import Choice
from tide_trainer.loop.shell_task import ShellTask
from tide_trainer.report.recorded import read_recorded
from tide_trainer.report.recording_file import RecordingFiles
from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Admit, Grant, Pause, Resume, TaskEntry
from tide_trainer.types import RankId

RANK = RankId("rollout", 0)


class Clock:
    def __init__(self):
        self.now_s = 50.0

    def __call__(self):
        return self.now_s


class World:
    """A recorder over the real scheduler and real files, with a clock that the test moves."""

    def __init__(self, settings, prompt, folder, choice):
        self.prompt = prompt
        self.clock = Clock()
        self.scheduler = TaskScheduler(settings.scheduler)
        self.scheduler.add_rank(RANK, 1000)
        self.folder = folder / "trajectories"
        files = RecordingFiles(self.folder, ImageStore(folder / "images"), "run", str, 1 << 20)
        self.recorder = TrajectoryRecorder(choice, self.scheduler, files, self.clock)
        self.heard = []
        self.handlers = self.recorder.tapped(call=self.heard.append, turn=self.heard.append)

    def begin(self, member=0, attempt=0, kind="train", temperature=1.0, version=0, group="train/0"):
        task = ShellTask(f"{group}.{member}.{attempt}", f"{group}/{member}", group, member, attempt, self.prompt,
                         kind, temperature, "key")  # fmt: skip
        self.scheduler.submit(TaskEntry(task.session, f"{group}/{member}/{attempt}", kind, 1, "toy"))
        self.recorder.begin(task, temperature, version)
        return task

    def at(self, now_s, event, session, **fields):
        self.clock.now_s = 50.0 + now_s
        self.handlers[event]({"session": session, **fields})

    async def end(self, task, found, now_s=9.0, version=1):
        self.clock.now_s = 50.0 + now_s
        task.result.set_result(found)
        self.recorder.end(task.session, task.result, version)
        await self.recorder.close()


@pytest.fixture
def world(settings, prompt, tmp_path):
    return lambda choice=None: World(settings, prompt, tmp_path, choice or Choice(1, 1, 1))


FOOTPRINT = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "image_tokens": 0, "context_tokens": 5}


async def test_a_recorded_task_has_its_turns_waits_pauses_and_reasons(world):
    world = world()
    task = world.begin()
    one = task.session
    world.recorder.decided((Admit(one, RANK, "probe"), Admit("other", RANK, "next")), 51.0)
    world.at(2.0, "call", one, call="a", attempt=0)
    world.recorder.decided((Pause(one, "full"),), 52.1)
    world.recorder.decided((Resume(one, RANK, "fits"),), 54.0)
    world.at(4.5, "turn", one, call="a", footprint=FOOTPRINT, engine_s=0.25, rank="rollout:0", version=0,
             finish_reason="stop")  # fmt: skip
    world.at(5.0, "call", one, call="b", attempt=0)
    world.at(5.5, "call", one, call="c", attempt=1)
    world.recorder.decided((Grant(one, RANK, "room"),), 55.5)
    world.at(6.0, "turn", one, call="c", footprint=FOOTPRINT, engine_s=0.5)
    await world.end(task, trajectory())
    record = read_recorded(world.folder / "train.0.0.json")
    first, second = record.turns
    assert (first.call_s, first.held_s, first.engine_s, first.end_s) == (2.0, 2.25, 0.25, 4.5)
    assert (first.reason, first.budget_tokens, first.rank, first.finish_reason) == ("fits", 1000, "rollout:0", "stop")
    assert (second.call_s, second.held_s, second.reason) == (5.0, 0.5, "room"), "a repeated call is the same turn's"
    assert [(event.kind, event.at_s, event.reason) for event in record.events] == [
        ("admitted", 1.0, "probe"), ("paused", 2.1, "full"), ("resumed", 4.0, "fits"),
    ]  # fmt: skip
    assert (record.duration_s, record.end_version, record.kind) == (9.0, 1, "train")
    assert len(world.heard) == 5, "the shell hears every event too"


async def test_a_task_that_is_not_chosen_costs_no_look_at_the_scheduler_and_leaves_no_file(world, monkeypatch):
    world = world(Choice(0, 0, 1))
    monkeypatch.setattr(world.scheduler, "view", lambda: pytest.fail("asked for nothing"))
    task = world.begin()
    world.at(1, "call", task.session, call="a")
    world.recorder.decided((Grant(task.session, RANK, "room"),), 51.0)
    world.at(2, "turn", task.session, call="a", footprint=FOOTPRINT)
    await world.end(task, trajectory())
    assert world.recorder._open == {}
    assert not world.folder.exists()


def test_hearing_an_event_of_another_task_costs_next_to_nothing(world):
    async def measure():
        tapped = world(Choice(0, 0, 1)).recorder.tapped(turn=lambda event: sum(range(2000)))["turn"]
        event = {"session": "x", "footprint": FOOTPRINT}

        def cpu_s(handler):
            began_s = time.thread_time()
            for _ in range(2000):
                handler(event)
            return time.thread_time() - began_s

        bare, with_tap = (min(cpu_s(one) for _ in range(5)) for one in (lambda event: sum(range(2000)), tapped))
        return with_tap / bare

    assert asyncio.run(measure()) < 1.5, "beside a handler of some 20 us"


def test_who_is_chosen():
    choice = Choice(num_samples=2, every=3, num_trajectories=2)
    evaluated = [choice.wants("eval", member, 1.0, 5) for member in range(4)]
    assert evaluated == [True, True, False, False]
    assert not choice.wants("eval", 0, 0.0, 5), "greedy"
    assert not choice.wants("eval", 0, 1.0, -999), "a warm start's"
    by_version = [(version, choice.wants("train", 7, 1.0, version)) for version in (0, 0, 0, 1, 2, 3, 3, 3, 4)]
    assert [version for version, wanted in by_version if wanted] == [0, 0, 3, 3]
    assert not any(Choice(0, 0, 2).wants("train", 0, 1.0, version) for version in range(5))


async def test_a_repeated_attempt_takes_the_place_of_the_failed_one_and_tells_of_it(world):
    world = world()
    task = world.begin()
    await world.end(task, trajectory(reward=None, outcome="infrastructure"))
    assert read_recorded(world.folder / "train.0.0.json").reward is None
    again, other = world.begin(attempt=1), world.begin(member=1, attempt=1)
    await world.end(again, trajectory())
    await world.end(other, trajectory(member=1))
    record = read_recorded(world.folder / "train.0.0.json")
    assert (record.reward, record.attempt) == (1.0, 1)
    assert [(one.attempt, one.outcome) for one in record.earlier_attempts] == [(0, "infrastructure")]
    assert [path.name for path in world.folder.iterdir()] == ["train.0.0.json"]


async def test_an_aborted_task_leaves_nothing(world):
    world = world()
    task = world.begin()
    world.recorder.end(task.session, task.result, 0)
    second = world.begin(member=1, version=1)
    second.result.cancel()
    world.recorder.end(second.session, second.result, 0)
    await world.recorder.close()
    assert world.recorder._open == {}
    assert not world.folder.exists()


async def test_what_cannot_be_written_is_logged_and_counted_and_harms_nobody(world, caplog):
    world = world(Choice(0, 1, 2))
    world.folder.write_text("a file in its place")
    await world.end(world.begin(), trajectory())
    assert "trajectory train/0/0 is not recorded: FileExistsError" in caplog.text
    assert world.recorder.num_left_out == 1


async def test_files_that_wait_are_bounded(world, monkeypatch, caplog):
    monkeypatch.setattr(recorder_module, "MAX_PENDING", 1)
    world = world(Choice(0, 1, 2))
    tasks = [world.begin(member) for member in range(2)]
    for member, task in enumerate(tasks):
        task.result.set_result(trajectory(member=member))
        world.recorder.end(task.session, task.result, 0)
    await world.recorder.close()
    assert [path.name for path in world.folder.iterdir()] == ["train.0.0.json"]
    assert "1 others wait to be written" in caplog.text


async def test_turns_and_events_are_bounded(world, monkeypatch):
    monkeypatch.setattr("tide_trainer.loop.recording.MAX_TURNS", 2)
    monkeypatch.setattr("tide_trainer.loop.recording.MAX_EVENTS", 1)
    world = world()
    task = world.begin()
    for number in range(3):
        world.at(number, "turn", task.session, call=str(number), footprint=FOOTPRINT)
        world.recorder.decided((Pause(task.session, "x" * 9000),), 50.0 + number)
    await world.end(task, trajectory())
    record = read_recorded(world.folder / "train.0.0.json")
    assert (len(record.turns), len(record.events), len(record.events[0].reason)) == (2, 1, 500)
    assert record.left_out == ("3 turns and events beyond the recording's bounds",)
