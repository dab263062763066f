"""What every training backend keeps: the fake, FSDP on one rank, and FSDP on two."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from tide_trainer.backends.fake_training import FakeTraining, FakeTrainingSettings, make_fake_model
from tide_trainer.backends.fsdp import FsdpBackend
from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model
from tide_trainer.backends.training_wire import FsdpSettings
from tide_trainer.cluster.local import LocalProcesses
from tide_trainer.errors import BackendFailed, ConfigurationError
from tide_trainer.types import Sequence, TrainBatch

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
WORDS = [f"w{number}" for number in range(9)]
VOCABULARY = 16
KINDS = ["fake", "fsdp1", "fsdp2"]


class Maker:
    """Makes backends of one kind on one model."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.processes = LocalProcesses(folder / "logs")
        self.model = folder / "model"
        self.count = 0
        if kind == "fake":
            make_fake_model(self.model, VOCABULARY)
        else:
            make_tiny_model(self.model, WORDS, TinyModel(hidden=32, layers=1, heads=1, kv_heads=1, feed_forward=32))

    def make(self, **settings):
        self.count += 1
        common = {"model": str(self.model), "publish_directory": str(self.folder / "published"), "learning_rate": 0.01}
        common |= settings
        if self.kind == "fake":
            common.pop("micro_batch_tokens", None)
            return FakeTraining(FakeTrainingSettings(**common))
        made = FsdpSettings(device="cpu", num_ranks=int(self.kind[-1]), **{"micro_batch_tokens": 30, **common})
        return FsdpBackend(made, self.processes, name=f"actor{self.count}")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def maker(request, tmp_path_factory):
    made = Maker(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    await made.processes.stop_all()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(maker):
    made = maker.make()
    assert await made.start() == 0
    yield made
    await made.stop()
    await made.stop()


def sequence(ids, sampled, advantage=1.0):
    return Sequence(tuple(ids), tuple(map(bool, sampled)), tuple(-2.0 * s for s in sampled), advantage)


GOOD = sequence([3, 8, 9, 2], [0, 0, 1, 1], 1.0)
BAD = sequence([3, 8, 10, 2, 3, 9], [0, 0, 1, 0, 0, 1], -1.0)
BATCH = TrainBatch("policy", (GOOD, BAD, GOOD))


async def score(backend, *sequences):
    return await backend.score([s.token_ids for s in sequences])


async def test_a_policy_update_raises_what_was_good(backend):
    before = await score(backend, GOOD, BAD)
    report = await backend.train(BATCH)
    after = await score(backend, GOOD, BAD)
    assert sum(after[0][2:]) > sum(before[0][2:])
    assert after[1][2] < before[1][2]
    assert (report.num_sequences, report.num_trained_tokens) == (3, 6)
    assert {"loss", "grad_norm", "entropy", "behaviour_weight", "logprob_gap", "learning_rate"} <= set(report.metrics)


async def test_a_supervised_update_lowers_the_loss(backend):
    batch = TrainBatch("supervised", (GOOD,), learning_rate=0.02)
    losses = [(await backend.train(batch)).metrics["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("batch", [TrainBatch("policy", ()), TrainBatch("policy", (sequence([3, 4], [0, 0]),))])
async def test_a_batch_that_trains_nothing_changes_nothing(backend, batch):
    before = await backend.publish(-50)
    report = await backend.train(batch)
    assert (report.num_sequences, report.num_trained_tokens, report.metrics["loss"]) == (0, 0, 0.0)
    assert (await backend.publish(-49)).checksums == before.checksums


async def test_scores_have_the_length_of_the_sequences_and_begin_with_zero(backend):
    found = await backend.score([[3, 4, 5], [7], [], [3, 4, 5, 6, 7, 8, 9, 10]])
    assert [len(row) for row in found] == [3, 1, 0, 8]
    assert found[0][0] == found[1][0] == 0.0
    assert all(value < 0 for value in found[3][1:])
    assert found[0][1:] == pytest.approx(found[3][1:3], abs=1e-5)
    assert await backend.score([]) == []


async def test_a_published_version_holds_the_announced_bytes_and_two_are_kept(backend):
    # A warm start counts up to version 0 from below.
    for version in (-12, -11, -10, -9, 0, 60, 61, 62):
        update = await backend.publish(version)
        assert len(list(Path(update.path).parent.iterdir())) <= 2
    assert update.version == 62
    tensors = load_file(update.path)
    found = {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in tensors.items()}
    assert found == dict(update.checksums)
    assert sorted(int(file.stem[1:]) for file in Path(update.path).parent.iterdir()) == [61, 62]


async def test_what_is_published_is_what_was_trained(backend):
    await score(backend, GOOD)
    first = await backend.publish(70)
    await backend.train(BATCH)
    second = await backend.publish(71)
    assert first.checksums.keys() == second.checksums.keys()
    assert all(first.checksums[name] != second.checksums[name] for name in first.checksums if "norm" not in name)


async def test_parts_that_do_not_fit_together_name_the_field(backend):
    bad = Sequence((1, 2, 3), (True,), (0.0, 0.0, 0.0), 1.0)
    with pytest.raises(ValueError, match=r"sequences\[0\]\.sampled"):
        await backend.train(TrainBatch("policy", (bad,)))


async def test_a_checkpoint_continues_the_same_curve(maker, backend, tmp_path):
    await backend.publish(80)
    directory = tmp_path / "checkpoint"
    await backend.save(str(directory), {"note": "first"})
    await backend.save(str(directory), {"note": "second"})
    assert json.loads((directory / "extra.json").read_text()) == {"note": "second"}
    assert json.loads((tmp_path / "checkpoint.previous" / "extra.json").read_text()) == {"note": "first"}
    expected = [(await backend.train(BATCH)).metrics["loss"] for _ in range(3)]
    other = maker.make()
    try:
        assert await other.start(str(directory)) == 80
        found = [(await other.train(BATCH)).metrics["loss"] for _ in range(3)]
    finally:
        await other.stop()
    assert found == pytest.approx(expected, abs=1e-6)


async def test_before_the_start_and_after_the_stop_calls_fail_and_stop_is_safe(maker):
    made = maker.make()
    await made.stop()
    with pytest.raises(BackendFailed, match=r"not started|stopped"):
        await made.train(BATCH)
    with pytest.raises(BackendFailed, match=r"not started|stopped"):
        await made.publish(1)


async def test_a_missing_model_is_a_configuration_error_before_anything_starts(maker):
    made = maker.make(model="/nowhere/model")
    with pytest.raises(ConfigurationError, match=r"model\.path"):
        await made.start()
    await made.stop()
