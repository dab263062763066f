"""Segments as they cross from the router to the main process, and what is looked at on their arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tide_trainer.images import check_spans
from tide_trainer.types import ImageSpan, Segment


def segment_data(segment: Segment) -> dict[str, Any]:
    """A segment as it crosses the channel."""
    data: dict[str, Any] = {
        "token_ids": segment.token_ids,
        "sampled": segment.sampled,
        "logprobs": segment.logprobs,
        "versions": segment.versions,
    }
    if segment.images:
        data["images"] = [(span.start, span.num_tokens, span.digest) for span in segment.images]
    return data


def read_segment(data: Mapping[str, Any]) -> Segment:
    """The inverse of `segment_data`. Raises ValueError if the lists differ in length, or images do not fit the ids."""
    lists = {name: tuple(data[name]) for name in ("token_ids", "sampled", "logprobs", "versions")}
    if len({len(values) for values in lists.values()}) != 1:
        raise ValueError("the lists of a segment differ in length")
    images = tuple(ImageSpan(*span) for span in data.get("images", ()))
    segment = Segment(**lists, images=images)
    if images:
        # Whatever the model's placeholder is: all ids of all images are it, and no other id is.
        place = images[0].start
        check_spans(segment.token_ids, images, segment.token_ids[place] if place < len(segment.token_ids) else None)
        if any(any(segment.sampled[span.start : span.start + span.num_tokens]) for span in images):
            raise ValueError("an id inside an image counts as sampled")
    return segment
