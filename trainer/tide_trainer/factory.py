"""Rollout engines and training backends by their configured names; nothing is started here."""

from __future__ import annotations

from pathlib import Path

from tide_trainer.backends.engine_process import EngineProcess
from tide_trainer.backends.fake_core import FakeSettings
from tide_trainer.backends.fake_engine import FakeEngine
from tide_trainer.backends.fake_training import FakeTraining, FakeTrainingSettings
from tide_trainer.backends.fsdp import FsdpBackend
from tide_trainer.backends.training_wire import FsdpSettings
from tide_trainer.backends.vllm_engine import VllmEngine
from tide_trainer.backends.vllm_settings import VllmSettings
from tide_trainer.cluster.local import LocalProcesses
from tide_trainer.protocols import TrainingBackend
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import RankId


def make_engine(
    settings: TrainerSettings,
    rank: RankId,
    model: Path,
    version: int,
    processes: LocalProcesses,
    directory: Path,
    images: Path,
) -> EngineProcess:
    """The engine of one rollout rank, whose weights in the model folder are `version`; `images` is the run's store."""
    rollout = settings.rollout
    seed = settings.run.seed * 1000 + rank.index
    if rollout.engine == "fake":
        fake = FakeSettings(
            model_path=str(model / "model.safetensors"),
            version=version,
            kv_tokens=rollout.kv_tokens,
            block_tokens=rollout.block_tokens,
            max_context_tokens=rollout.max_context_tokens,
            max_running=rollout.max_running,
            seed=seed,
            image_folder=str(images),
        )
        return FakeEngine(
            rank,
            fake,
            processes,
            directory,
            ready_timeout_s=rollout.ready_timeout_s,
            call_timeout_s=rollout.sync_timeout_s,
        )
    vllm = VllmSettings(
        model_path=str(model),
        version=version,
        kv_tokens=rollout.kv_tokens,
        block_tokens=rollout.block_tokens,
        max_context_tokens=rollout.max_context_tokens,
        max_running=rollout.max_running,
        num_threads=rollout.num_threads,
        seed=seed,
        image_folder=str(images),
    )
    return VllmEngine(
        rank,
        vllm,
        processes,
        directory,
        ready_timeout_s=rollout.ready_timeout_s,
        call_timeout_s=rollout.sync_timeout_s,
    )


def make_backend(
    settings: TrainerSettings, model: Path, processes: LocalProcesses, directory: Path, images: Path
) -> TrainingBackend:
    """The Actor ranks; weights are published to `directory`, best on a tmpfs; `images` is the run's store."""
    train = settings.train
    if train.backend == "fake":
        fake = FakeTrainingSettings(
            model=str(model),
            publish_directory=str(directory),
            learning_rate=train.learning_rate,
            betas=train.betas,
            loss=settings.algorithm.loss,
        )
        return FakeTraining(fake)
    fsdp = FsdpSettings(
        model=str(model),
        publish_directory=str(directory),
        num_ranks=train.num_ranks,
        num_threads=train.num_threads,
        seed=settings.run.seed,
        learning_rate=train.learning_rate,
        betas=train.betas,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        micro_batch_tokens=train.micro_batch_tokens,
        image_folder=str(images),
        loss=settings.algorithm.loss,
        boot_timeout_s=train.timeout_s,
        timeout_s=train.timeout_s,
    )
    return FsdpBackend(fsdp, processes)
