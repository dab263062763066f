"""FSDP over processes: ranks agree, a dead rank is loud, a checkpoint is an ordinary model folder."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from tide_trainer.backends.fsdp import FsdpBackend, publish_directory
from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model
from tide_trainer.backends.training_wire import FsdpSettings
from tide_trainer.cluster.local import LocalProcesses
from tide_trainer.errors import BackendFailed, ConfigurationError
from tide_trainer.objectives import LossSettings
from tide_trainer.types import Sequence, TrainBatch

pytestmark = pytest.mark.timeout(300)
WORDS = [f"w{number}" for number in range(9)]
SHAPE = TinyModel(hidden=32, layers=2, heads=2, kv_heads=1, feed_forward=32)


def sequence(ids, sampled, advantage):
    return Sequence(tuple(ids), tuple(map(bool, sampled)), tuple(-2.0 * s for s in sampled), advantage)


BATCH = TrainBatch(
    "policy",
    (
        sequence([3, 8, 9, 2, 3], [0, 0, 1, 1, 0], 1.0),
        sequence([3, 8, 10, 2, 3, 9, 9, 9], [0, 0, 1, 0, 0, 1, 1, 1], -0.5),
        sequence([3, 8], [0, 1], 0.25),
    ),
)


@pytest.fixture
async def processes(tmp_path):
    made = LocalProcesses(tmp_path / "logs")
    yield made
    await made.stop_all()


@pytest.fixture
def model(tmp_path):
    return str(make_tiny_model(tmp_path / "model", WORDS, SHAPE))


async def test_ranks_agree_with_one_rank_and_the_checkpoint_loads_anywhere(processes, model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    results = {}
    for num_ranks in (1, 2):
        directory = str(tmp_path / f"published{num_ranks}")
        settings = FsdpSettings(model, directory, num_ranks=num_ranks, device="cpu", micro_batch_tokens=8)
        backend = FsdpBackend(settings, processes, name=f"world{num_ranks}")
        await backend.start()
        await backend.train(BATCH)
        # One trained sequence, so that the second rank has nothing to do.
        report = await backend.train(TrainBatch("policy", BATCH.sequences[:1]))
        update = await backend.publish(1)
        await backend.save(str(tmp_path / f"saved{num_ranks}"), {})
        results[num_ranks] = (report.metrics, load_file(update.path))
        await backend.stop()
    one, two = results[1], results[2]
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], abs=1e-5)
    for name, value in one[1].items():
        torch.testing.assert_close(two[1][name], value, atol=1e-5, rtol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved2", local_files_only=True).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in two[1].items())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved2", local_files_only=True).eos_token == "<end>"
    # A checkpoint of two ranks continues on one.
    settings = FsdpSettings(model, str(tmp_path / "p"), device="cpu")
    backend = FsdpBackend(settings, processes, name="resumed")
    assert await backend.start(str(tmp_path / "saved2")) == 1
    await backend.stop()


async def test_a_dead_rank_fails_the_call_in_flight_and_all_later_ones(processes, model, tmp_path):
    backend = FsdpBackend(FsdpSettings(model, str(tmp_path / "p"), num_ranks=2, device="cpu"), processes)
    await backend.start()
    os.kill(backend.children[1].pid, signal.SIGSTOP)
    training = asyncio.ensure_future(backend.train(BATCH))
    await asyncio.sleep(0)
    os.kill(backend.children[1].pid, signal.SIGKILL)
    with pytest.raises(BackendFailed, match="train"):
        await training
    with pytest.raises(BackendFailed, match="start anew"):
        await backend.publish(1)
    await backend.stop()
    assert processes.children == ()


async def test_a_rank_that_cannot_load_its_model_names_the_reason(processes, model, tmp_path):
    (tmp_path / "model" / "model.safetensors").write_bytes(b"broken")
    backend = FsdpBackend(FsdpSettings(model, str(tmp_path / "p"), device="cpu"), processes)
    with pytest.raises(BackendFailed, match="boot"):
        await backend.start()
    assert processes.children == ()


async def test_a_late_boot_is_ended(processes, model, tmp_path):
    settings = FsdpSettings(model, str(tmp_path / "p"), device="cpu", boot_timeout_s=0.05)
    with pytest.raises(BackendFailed, match=r"not up within 0\.05 s"):
        await FsdpBackend(settings, processes).start()
    assert processes.children == ()


def test_a_kl_penalty_is_refused_without_a_reference(model, tmp_path):
    settings = FsdpSettings(model, str(tmp_path), loss=LossSettings(kl_coefficient=0.1))
    with pytest.raises(ConfigurationError, match="kl_coefficient"):
        FsdpBackend(settings, LocalProcesses(tmp_path / "logs"))


def test_published_versions_lie_in_a_folder_of_this_user():
    folder = publish_directory("test")
    try:
        assert os.stat(folder).st_mode & 0o077 == 0
    finally:
        os.rmdir(folder)
