"""What the main process and a training rank say to each other, as plain JSON data. No torch.

boot {checkpoint}                       -> {version}
train {micro_batches, any_images, ...}  -> {metrics, grad_norm, learning_rate, cpu_s}
score {micro_batches, any_images}       -> {logprobs}
publish {version, directory}            -> {path, checksums} from rank 0, {} from the others
save {directory, extra}                 -> {}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tide_trainer.images import check_spans
from tide_trainer.objectives import LossSettings
from tide_trainer.types import ImageSpan
from tide_trainer.types import Sequence as TrainSequence


@dataclass(frozen=True, slots=True)
class FsdpSettings:
    """What the training backend is.

    Attributes:
        model: a Hugging Face model folder; the fresh start.
        publish_directory: where model versions are written for the rollout ranks; best on a tmpfs.
        num_ranks: Actor ranks, each a process.
        num_threads: CPU threads of a rank.
        device: cpu, cuda (one GPU per rank), or auto: cuda where it is there.
        dtype: of the compute; the weights and the optimizer are always float32.
        seed: of torch's generators in the ranks.
        learning_rate: AdamW's.
        betas: AdamW's.
        weight_decay: AdamW's.
        max_grad_norm: the gradient is scaled down to this norm; 0: never.
        micro_batch_tokens: most tokens of a micro-batch, padding and the placeholder ids of images included.
        image_folder: the run's image store; empty: sequences with images are refused.
        loss: the policy loss.
        boot_timeout_s: longest boot of all ranks.
        timeout_s: longest train step, score, publish or save.
    """

    model: str
    publish_directory: str
    num_ranks: int = 1
    num_threads: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 16_384
    image_folder: str = ""
    loss: LossSettings = field(default_factory=lambda: LossSettings.model_validate({}))
    boot_timeout_s: float = 300.0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The settings file of one rank: the backend's settings, its place, and where to find the others."""

    settings: FsdpSettings
    rank: int
    socket: str
    rendezvous: str

    def write(self, path: Path) -> None:
        """Writes the file, readable by this user only."""
        data = asdict(self)
        data["settings"]["loss"] = self.settings.loss.model_dump()
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(data, file)

    @classmethod
    def read(cls, path: str | Path) -> RankSettings:
        """Reads a file of `write`."""
        data = json.loads(Path(path).read_text("utf-8"))
        values = data.pop("settings")
        values["betas"] = tuple(values["betas"])
        values["loss"] = LossSettings.model_validate(values["loss"])
        return cls(settings=FsdpSettings(**values), **data)


def pack(sequence: TrainSequence) -> dict[str, Any]:
    """A sequence as JSON data: only trained positions and their log-probs travel.

    A sampled first token trains nothing: no token stands before it.
    """
    trained = [position for position, sampled in enumerate(sequence.sampled) if sampled and position]
    packed: dict[str, Any] = {
        "ids": list(sequence.token_ids),
        "trained": trained,
        "logprobs": [sequence.logprobs[position] for position in trained],
        "advantage": sequence.advantage,
    }
    if sequence.images:
        packed["images"] = pack_images(sequence.images)
    return packed


def pack_images(spans: Sequence[ImageSpan]) -> list[tuple[int, int, str]]:
    """Spans as JSON data."""
    return [(span.start, span.num_tokens, span.digest) for span in spans]


def check_sequence(sequence: TrainSequence, index: int, placeholder_id: int | None) -> None:
    """Raises ValueError naming the field of a sequence whose parts do not fit together.

    Args:
        sequence: the sequence.
        index: its place, for the error.
        placeholder_id: the model's; None for a model without images.
    """
    length = len(sequence.token_ids)
    for name in ("sampled", "logprobs"):
        if len(getattr(sequence, name)) != length:
            raise ValueError(f"sequences[{index}].{name} has {len(getattr(sequence, name))} entries for {length} ids")
    if length and min(sequence.token_ids) < 0:
        raise ValueError(f"sequences[{index}].token_ids has a negative id")
    try:
        check_spans(sequence.token_ids, sequence.images, placeholder_id)
    except ValueError as error:
        raise ValueError(f"sequences[{index}].images: {error}") from None
    for span in sequence.images:
        if any(sequence.sampled[span.start : span.start + span.num_tokens]):
            raise ValueError(f"sequences[{index}].sampled is True inside the image at {span.start}")


def combine(answers: Sequence[Mapping[str, Any]], num_tokens: int) -> dict[str, float]:
    """The update's metrics from the sums and maxima of all ranks: names lose `_sum`, means are per trained token."""
    metrics: dict[str, float] = {}
    for answer in answers:
        for name, value in answer["metrics"].items():
            if name.endswith("_max"):
                metrics[name] = max(metrics.get(name, 0.0), value)
            else:
                short = name.removesuffix("_sum")
                # The loss is a share of the whole already.
                metrics[short] = metrics.get(short, 0.0) + (value if short == "loss" else value / max(num_tokens, 1))
    return metrics
