"""The torch half of a training rank: model, optimizer, one update, scores. Synchronous; `fsdp_rank` serves it.

All ranks call the same methods in the same order, each with its own share of the data: every method may communicate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tide_trainer.backends import checkpoint_files
from tide_trainer.backends.image_inputs import ImageInputs
from tide_trainer.backends.losses import LossInputs, Totals, policy_loss, supervised_loss
from tide_trainer.backends.policy_model import Padded, entropy, full, load_policy, log_probs, shard
from tide_trainer.backends.training_wire import RankSettings
from tide_trainer.backends.vision_batch import VisionBatch, vision_batch
from tide_trainer.images import ImageStore, ImageTokens

_CACHED_IMAGE_BYTES = 256 * 1024 * 1024
"""Patches that stay between micro-batches: siblings begin with the same image."""


class NotFinite(Exception):
    """The loss or the gradient is not finite; the weights were left as they are."""


class FsdpWorker:
    """One training rank.

    Args:
        place: the rank's settings file as read.
    """

    def __init__(self, place: RankSettings) -> None:
        self._settings = place.settings
        self._rank, self._world = place.rank, place.settings.num_ranks
        torch.set_num_threads(place.settings.num_threads)
        torch.manual_seed(place.settings.seed + place.rank)
        self._device = _device(place)
        if self._world > 1:
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(backend, f"file://{place.rendezvous}", rank=place.rank, world_size=self._world)
        self._version = 0
        self._objective = ""
        self._source = place.settings.model

    def boot(self, checkpoint: str | None) -> int:
        """Loads the model, and the optimizer if the folder is a checkpoint; returns the model version."""
        settings = self._settings
        self._source = checkpoint or settings.model
        self._model = load_policy(self._source, self._device)
        self._images = None
        if ImageTokens.read(self._source) is not None:
            store = ImageStore(settings.image_folder)
            self._images = ImageInputs(self._source, store, max_cached_bytes=_CACHED_IMAGE_BYTES)
        dtype = getattr(torch, settings.dtype)
        self._autocast = torch.autocast(self._device.type, dtype=dtype, enabled=dtype != torch.float32)
        if self._world > 1:
            from torch.distributed.device_mesh import init_device_mesh

            shard(self._model, init_device_mesh(self._device.type, (self._world,)), dtype)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=self._world == 1,
        )
        if checkpoint is not None:
            parameters = dict(self._model.inner.named_parameters())
            loaded = checkpoint_files.load_state(checkpoint, parameters, self._optimizer, self._rank)
            self._version, self._objective = loaded
        return self._version

    def train(
        self,
        objective: str,
        micro_batches: Sequence[Sequence[Mapping[str, Any]]],
        totals: Totals,
        learning_rate: float | None,
        any_images: bool = False,
    ) -> dict[str, Any]:
        """One optimizer update from this rank's micro-batches, of which every rank has the same number.

        `any_images` is whether any rank's have images.

        Raises:
            NotFinite: on all ranks alike; nothing was changed.
        """
        began = time.process_time()
        self._optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, float] = {}
        for sequences in micro_batches:
            with self._autocast:
                loss, found = self._loss(objective, sequences, totals, any_images)
            # FSDP averages gradients over ranks, and the loss is a sum over them.
            (loss * self._world).backward()
            for name, value in found.items():
                before = metrics.get(name, 0.0)
                metrics[name] = max(before, value) if name.endswith("_max") else before + value
        limit = self._settings.max_grad_norm or float("inf")
        norm = float(full(torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit)))
        if not norm < float("inf"):
            self._optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"the gradient norm is {norm}; the update was not applied")
        self._prepare(objective, learning_rate or self._settings.learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"metrics": metrics, "grad_norm": norm, "cpu_s": time.process_time() - began}

    def score(
        self, micro_batches: Sequence[Sequence[Mapping[str, Any]]], any_images: bool = False
    ) -> list[list[float]]:
        """Log-probs of the chosen positions of each sequence, in order, in float32."""
        answers: list[list[float]] = []
        with torch.no_grad():
            for sequences in micro_batches:
                padded = Padded(sequences, self._device)
                vision = self._vision(sequences, padded, any_images)
                found, _ = log_probs(self._model(padded.ids, padded.rows, padded.columns, vision), padded.targets)
                parts = found.cpu().split([len(sequence["trained"]) for sequence in sequences])
                answers += [part.tolist() for part in parts]
        return answers

    def publish(self, version: int, directory: str) -> dict[str, Any]:
        """Writes the weights as `version`; rank 0 answers with the path and the checksums."""
        self._version = version
        tensors = self._full_tensors()
        if self._rank:
            return {}
        path, checksums = checkpoint_files.publish(directory, version, tensors)
        return {"path": path, "checksums": checksums}

    def save(self, directory: str, extra: Mapping[str, str]) -> None:
        """Writes a checkpoint; the older one stays whole until the new one is."""
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.inner.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                whole = full(value) if torch.is_tensor(value) else torch.tensor(float(value))
                if not self._rank:
                    state[f"{key}.{name}"] = whole.cpu().contiguous()
        generators = self._generators()
        tensors = self._full_tensors()
        if not self._rank:
            place = {"version": self._version, "objective": self._objective}
            checkpoint_files.save(directory, self._source, tensors, {**state, **generators}, place, extra)
        if self._world > 1:
            dist.barrier()

    def close(self) -> None:
        """Leaves the process group."""
        if self._world > 1:
            dist.destroy_process_group()

    def _vision(self, sequences: Sequence[Mapping[str, Any]], padded: Padded, any_images: bool) -> VisionBatch | None:
        if not any_images or self._images is None:
            return None
        return vision_batch(sequences, padded.shape, self._images, self._device)

    def _loss(
        self, objective: str, sequences: Sequence[Mapping[str, Any]], totals: Totals, any_images: bool
    ) -> tuple[torch.Tensor, dict[str, float]]:
        settings = self._settings.loss
        padded = Padded(sequences, self._device)
        vision = self._vision(sequences, padded, any_images)
        found, every = log_probs(self._model(padded.ids, padded.rows, padded.columns, vision), padded.targets)
        mask = padded.spread(torch.ones_like(padded.rows, dtype=torch.bool))
        lp = padded.spread(found)
        with torch.set_grad_enabled(settings.entropy_coefficient > 0 and objective == "policy"):
            spread_entropy = padded.spread(entropy(every))
        if objective == "supervised":
            loss = supervised_loss(lp, mask, totals)
            return loss, {"loss_sum": float(loss.detach()), "entropy_sum": float(spread_entropy.sum())}
        advantages = [sequence["advantage"] for sequence in sequences] or [0.0]
        inputs = LossInputs(
            logprobs=lp,
            engine=padded.gather(sequences, "logprobs"),
            advantages=torch.tensor(advantages, dtype=torch.float32, device=self._device)[:, None],
            mask=mask,
            entropy=spread_entropy,
        )
        return policy_loss(inputs, settings, totals)

    def _prepare(self, objective: str, learning_rate: float) -> None:
        """Sets the learning rate; another objective than before begins with fresh moments.

        The moments of supervised gradients, which are larger, would hold policy updates down for dozens of steps.
        """
        if objective != self._objective:
            self._optimizer.state.clear()
            self._objective = objective
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def _full_tensors(self) -> dict[str, torch.Tensor]:
        """All weights on rank 0, nothing elsewhere; every rank takes part."""
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in self._model.tensors():
            value = full(tensor)
            if not self._rank:
                whole[name] = value.cpu().contiguous()
        return whole

    def _generators(self) -> dict[str, torch.Tensor]:
        """The state of every rank's random generators."""
        mine = {f"rng.{self._rank}": torch.get_rng_state()}
        if self._device.type == "cuda":
            mine[f"cuda_rng.{self._rank}"] = torch.cuda.get_rng_state(self._device)
        if self._world == 1:
            return mine
        gathered: list[Any] = [None] * self._world
        dist.all_gather_object(gathered, {name: value.tolist() for name, value in mine.items()})
        return {name: torch.tensor(v, dtype=torch.uint8) for part in gathered for name, v in part.items()}


def _device(place: RankSettings) -> torch.device:
    wanted = place.settings.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    torch.cuda.set_device(place.rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
