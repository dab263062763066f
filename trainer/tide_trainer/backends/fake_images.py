"""Images in the fake engine: checked as a real engine checks them, and told apart in its simulated cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tide_trainer.images import ImageStore, ImageTokens, check_spans, image_size
from tide_trainer.types import ImageSpan

_MAX_COUNTS = 4096


class FakeImages:
    """What the fake engine makes of images.

    Args:
        model_dir: the model folder; without `config.json` the model takes no images.
        image_folder: the run's image store; empty: no image is taken.
    """

    def __init__(self, model_dir: Path, image_folder: str) -> None:
        known = image_folder and (model_dir / "config.json").is_file()
        self._tokens = ImageTokens.read(model_dir) if known else None
        self._store = ImageStore(image_folder)
        self._counts: dict[str, int] = {}
        self.forbidden = frozenset(self._tokens.forbidden_ids if self._tokens else ())

    def check(self, token_ids: Sequence[int], spans: Sequence[ImageSpan]) -> None:
        """Raises ValueError, ImageRefused or ImageFailed as `image_inputs.ImageInputs.load` does."""
        check_spans(token_ids, spans, self._tokens.placeholder_id if self._tokens else None)
        for number, span in enumerate(spans):
            if (count := self._count(span.digest)) != span.num_tokens:
                raise ValueError(
                    f"image {number} ({span.digest[:12]}) at {span.start} has {span.num_tokens} placeholder ids, and "
                    f"the model's image processor makes {count} of it"
                )

    def _count(self, digest: str) -> int:
        count = self._counts.get(digest)
        if count is None:
            if self._tokens is None:
                raise ValueError("the model takes no images")
            count = self._tokens.count(*image_size(self._store.read(digest)))
            if len(self._counts) >= _MAX_COUNTS:
                self._counts.clear()
            self._counts[digest] = count
        return count


def cache_ids(token_ids: list[int], spans: Sequence[ImageSpan]) -> list[int]:
    """The ids with each image's placeholders replaced by negative ones of its own: what the prefix cache compares."""
    if not spans:
        return token_ids
    ids = list(token_ids)
    for span in spans:
        ids[span.start : span.start + span.num_tokens] = [-1 - int(span.digest[:15], 16)] * span.num_tokens
    return ids
