"""A training backend without torch: a table of logits, learnt by the same rules. For tests of the whole loop.

The model is a folder whose `model.safetensors` holds one tensor, `logits` [V, V] float32: the logits of the next token
given the previous one. The fake rollout engine serves the very same file. `make_fake_model` makes the folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tide_trainer import types
from tide_trainer.backends import whole_files
from tide_trainer.backends.training_wire import check_sequence
from tide_trainer.errors import BackendFailed, ConfigurationError
from tide_trainer.images import ImageTokens
from tide_trainer.objectives import LossSettings

TENSOR = "logits"
_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class FakeTrainingSettings:
    """What the fake backend is; names as in `FsdpSettings`."""

    model: str
    publish_directory: str
    learning_rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    loss: LossSettings = field(default_factory=lambda: LossSettings.model_validate({}))
    train_s: float = 0.0


class FakeTraining:
    """`protocols.TrainingBackend` in this process: Adam on a bigram table, the same for the same input.

    With one update per batch every clipped loss has REINFORCE's gradient, weighted by the behaviour weight; that is
    what is computed here, whatever `loss.policy` says.

    Args:
        settings: the model and the optimizer; `train_s` is a simulated duration of a train step.
    """

    def __init__(self, settings: FakeTrainingSettings) -> None:
        self._settings = settings
        self._table: np.ndarray[Any, Any] | None = None
        self._moments: dict[str, np.ndarray[Any, Any]] = {}
        self._num_updates = 0
        self._version = 0
        self._source = settings.model
        self._placeholder_id: int | None = None
        self._lock = asyncio.Lock()

    async def start(self, checkpoint: str | None = None) -> int:
        """Loads the table; see `protocols.TrainingBackend`.

        Raises:
            ConfigurationError: there is no such folder, or its file holds another model.
        """
        self._source = whole_files.existing(checkpoint or self._settings.model)
        tensors = load_file(Path(self._source) / whole_files.WEIGHTS)
        table = tensors.get(TENSOR)
        if table is None or table.ndim != 2 or table.shape[0] != table.shape[1]:
            raise ConfigurationError("model.path", f"{self._source!r} holds no square tensor '{TENSOR}'")
        self._table = table.astype(np.float32)
        tokens = ImageTokens.read(self._source) if (Path(self._source) / "config.json").is_file() else None
        self._placeholder_id = tokens.placeholder_id if tokens else None
        self._moments = {name: np.zeros_like(self._table) for name in ("exp_avg", "exp_avg_sq")}
        self._num_updates, self._version = 0, 0
        place = whole_files.saved_place(self._source) if checkpoint else None
        if place is not None:
            state = load_file(Path(self._source) / whole_files.STATE_TENSORS)
            self._moments = {name: state[name] for name in self._moments}
            self._num_updates, self._version = int(state["step"][0]), int(place["version"])
        return self._version

    async def train(self, batch: types.TrainBatch) -> types.TrainReport:
        """One Adam update; see `protocols.TrainingBackend`. Raises ValueError for parts that do not fit together."""
        began, cpu = time.monotonic(), time.process_time()
        for index, sequence in enumerate(batch.sequences):
            check_sequence(sequence, index, self._placeholder_id)
        trained = [s for s in batch.sequences if any(s.sampled[1:])]
        num_tokens = sum(sum(s.sampled[1:]) for s in trained)
        table = self._up()
        if not num_tokens:
            return types.TrainReport(0, 0, 0.0, 0.0, {"loss": 0.0, "grad_norm": 0.0})
        if self._settings.train_s:
            await asyncio.sleep(self._settings.train_s)
        async with self._lock:
            gradient, metrics = self._gradient(table, trained, num_tokens, batch.objective == "supervised")
            rate = batch.learning_rate or self._settings.learning_rate
            self._apply(gradient, rate)
        metrics |= {"grad_norm": float(np.sqrt((gradient**2).sum())), "learning_rate": rate}
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
        return types.TrainReport(len(trained), num_tokens, wall_s, cpu_s, metrics)

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[types.ImageSpan]] = ()
    ) -> list[list[float]]:
        """Log-probs at the present table, which knows no images; see `protocols.TrainingBackend`."""
        del images
        logprobs = _log_softmax(self._up())
        return [
            [0.0, *(float(logprobs[before, now]) for before, now in itertools.pairwise(ids))] if ids else []
            for ids in sequences
        ]

    async def publish(self, version: int) -> types.WeightUpdate:
        """Writes the present table as `version`; see `protocols.TrainingBackend`."""
        table = self._up()
        with whole_files.published(self._settings.publish_directory, version) as (part, path):
            save_file({TENSOR: table}, part)
        self._version = version
        return types.WeightUpdate(version, str(path), {TENSOR: hashlib.sha256(table.tobytes()).hexdigest()})

    async def save(self, directory: str, extra: Mapping[str, str]) -> None:
        """Writes a checkpoint; see `protocols.TrainingBackend`."""
        table = self._up()
        with whole_files.checkpoint(directory, self._source, {"version": self._version}, extra) as folder:
            save_file({TENSOR: table}, folder / whole_files.WEIGHTS)
            state = {**self._moments, "step": np.array([self._num_updates], dtype=np.int64)}
            save_file(state, folder / whole_files.STATE_TENSORS)

    async def stop(self) -> None:
        """Forgets the table; safe to call twice and before `start`."""
        self._table = None

    def _up(self) -> np.ndarray[Any, Any]:
        if self._table is None:
            raise BackendFailed("the training backend is not started")
        return self._table

    def _gradient(
        self, table: np.ndarray[Any, Any], trained: Sequence[types.Sequence], num_tokens: int, supervised: bool
    ) -> tuple[np.ndarray[Any, Any], dict[str, float]]:
        settings = self._settings.loss
        logprobs = _log_softmax(table.astype(np.float64))
        probs = np.exp(logprobs)
        row_entropy = -(probs * logprobs).sum(-1)
        gradient = np.zeros_like(probs)
        sums = dict.fromkeys(("loss", "entropy", "behaviour_weight", "logprob_gap"), 0.0)
        for sequence in trained:
            for position in range(1, len(sequence.token_ids)):
                if not sequence.sampled[position]:
                    continue
                before, now = sequence.token_ids[position - 1], sequence.token_ids[position]
                weight = 1.0
                gap = float(logprobs[before, now]) - sequence.logprobs[position]
                if not supervised and settings.behaviour != "none":
                    weight = min(math.exp(min(gap, 20.0)), settings.behaviour_cap or math.inf)
                strength = weight * (1.0 if supervised else sequence.advantage)
                gradient[before] += strength * probs[before]
                gradient[before, now] -= strength
                sums["loss"] -= strength * float(logprobs[before, now])
                sums["entropy"] += float(row_entropy[before])
                sums["behaviour_weight"] += weight
                sums["logprob_gap"] += abs(gap)
        return gradient / num_tokens, {name: value / num_tokens for name, value in sums.items()}

    def _apply(self, gradient: np.ndarray[Any, Any], rate: float) -> None:
        first, second = self._settings.betas
        self._num_updates += 1
        moments = self._moments
        moments["exp_avg"] = (first * moments["exp_avg"] + (1 - first) * gradient).astype(np.float32)
        moments["exp_avg_sq"] = (second * moments["exp_avg_sq"] + (1 - second) * gradient**2).astype(np.float32)
        mean = moments["exp_avg"] / (1 - first**self._num_updates)
        square = moments["exp_avg_sq"] / (1 - second**self._num_updates)
        self._table = (self._up() - rate * mean / (np.sqrt(square) + _EPS)).astype(np.float32)


def make_fake_model(directory: str | Path, vocabulary: int, seed: int = 0, spread: float = 0.5) -> Path:
    """Writes a fake model's weights: random logits from a seed. Tokenizer files may lie in the same folder."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    table = np.random.default_rng(seed).normal(0.0, spread, (vocabulary, vocabulary)).astype(np.float32)
    save_file({TENSOR: table}, folder / whole_files.WEIGHTS)
    return folder


def _log_softmax(table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = table - table.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
