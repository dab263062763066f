from __future__ import annotations

import pytest
from loop_fakes import ScriptedRunner, trajectory

from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model
from tide_trainer.errors import RunFailed
from tide_trainer.loop.sync import SyncReport
from tide_trainer.loop.warm_start import FIRST_VERSION, WarmStart, record_demonstrations
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.supervised import supervised_sequences
from tide_trainer.types import Sequence, TrainReport

CONVERSATION = [
    {"role": "user", "content": "go to the ball", "expert_action": "left"},
    {"role": "assistant", "content": "left"},
    {"role": "user", "content": "the ball", "expert_action": "forward"},
    {"role": "assistant", "content": "forward"},
    {"role": "user", "content": "ball"},
]


class Backend:
    """Counts supervised train steps."""

    def __init__(self):
        self.batches = []

    async def train(self, batch):
        self.batches.append(batch)
        return TrainReport(len(batch.sequences), 1, 0.0, 0.0, {"loss": 1.0})


class Sync:
    def __init__(self):
        self.versions = []

    async def to_version(self, version):
        self.versions.append(version)
        return SyncReport(version, 0.0, 0.0)


def warm_start(settings, backend, sync, success, records, **changes):
    """`success(measurement)` is the share of winning members at the n-th measurement."""
    warm = settings.warm_start.model_copy(
        update={"first_evaluation": 2, "steps_between_evaluations": 3, "num_eval": 4, "max_steps": 12} | changes
    )
    settings = settings.model_copy(update={"warm_start": warm})

    def script(_prompt, group, member, _attempt):
        return trajectory(group, member, float(member < 4 * success(len(sync.versions))))

    runner = ScriptedRunner(script)
    return WarmStart(backend, sync, runner, settings, lambda event, **fields: records.append(fields)), runner


async def test_it_stops_on_measured_success_and_version_zero_is_its_result(settings):
    backend, sync, records = Backend(), Sync(), []
    warm, runner = warm_start(settings, backend, sync, lambda n: 0.25 * (n - 1), records)
    await warm.run([Sequence((1, 2), (False, True), (0.0, 0.0), 1.0)] * 3)
    # Measured after steps 2, 5 and 8: 0, .25 and .5, and .5 is in the band.
    assert len(backend.batches) == 8
    assert sync.versions == [FIRST_VERSION + 1, FIRST_VERSION + 2, FIRST_VERSION + 3, 0]
    assert [record["sampled_success"] for record in records if record["sampled_success"] is not None] == [
        0.0,
        0.25,
        0.5,
    ]
    assert records[-1]["greedy_success"] == 0.5
    assert 0.0 in runner.temperatures
    assert {batch.objective for batch in backend.batches} == {"supervised"}


async def test_it_fails_with_advice_when_success_never_comes(settings):
    warm, _ = warm_start(settings, Backend(), Sync(), lambda n: 0.0, [])
    with pytest.raises(RunFailed, match=r"warm_start\.max_steps"):
        await warm.run([Sequence((1, 2), (False, True), (0.0, 0.0), 1.0)])


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    words = ["go", "to", "the", "ball", "left", "forward"]
    return Renderer(make_tiny_model(tmp_path_factory.mktemp("model"), words, TinyModel(hidden=32, layers=1)))


def test_demonstrations_train_on_the_replies_and_their_ends_alone(renderer):
    (sequence,) = supervised_sequences(renderer, [CONVERSATION])
    words = [renderer.token_text(token) for token in sequence.token_ids]
    assert words == [
        "<user>", "go", "to", "the", "ball", "<assistant>", "left", "<end>",
        "<user>", "the", "ball", "<assistant>", "forward", "<end>",
    ]  # fmt: skip
    trained = [word for word, sampled in zip(words, sequence.sampled, strict=True) if sampled]
    assert trained == ["left", "<end>", "forward", "<end>"]


class Workers:
    def __init__(self, account):
        self.account = account
        self.specs = []

    async def run(self, session, spec, api_key, router_url):
        self.specs.append(spec)
        return self.account(len(self.specs))


async def test_only_demonstrations_that_succeeded_are_kept(settings):
    workers = Workers(lambda n: {"reward": float(n % 2), "messages": [n], "outcome": "completed"})
    settings = settings.model_copy(update={"warm_start": settings.warm_start.model_copy(update={"num_episodes": 6})})
    found = await record_demonstrations(workers, "http://router", settings, "run")
    assert found == [[1], [3], [5]]
    assert all(spec["task"]["expert"] for spec in workers.specs)


async def test_a_demonstrator_that_fails_everywhere_ends_the_run_with_its_error(settings):
    workers = Workers(lambda n: {"reward": None, "messages": [], "outcome": "agent_error", "error": "no expert here"})
    with pytest.raises(RunFailed, match="no expert here"):
        await record_demonstrations(workers, "http://router", settings, "run")
