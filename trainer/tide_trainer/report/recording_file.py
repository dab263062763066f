"""Writes a recorded trajectory: a whole file or none, of bounded size, with images by their digest."""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tide_trainer.errors import TrainerError
from tide_trainer.images import ImageStore
from tide_trainer.report.recorded import FORMAT, MAX_FILE_BYTES, RecordedFailed, RecordedTrajectory, file_name
from tide_trainer.types import ImageSpan, Prompt, Segment, Trajectory

MAX_TOKENS = 250_000
MAX_MESSAGES = 5_000
MAX_TEXT_CHARS = 200_000
MAX_MESSAGES_CHARS = 4_000_000
MAX_DEPTH = 12
MAX_ITEMS = 2_000
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_DIGEST_IN_URL = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])")


class RecordingFiles:
    """The files of a run's recorded trajectories. Every method blocks; one thread at a time.

    Args:
        folder: where they go; made by the first one.
        images: the run's image store.
        run: the run's name.
        token_text: an id's text in its place behind others.
        max_bytes: of all files together; training trajectories get half.
        max_context_tokens: longest prompt plus completion of the run.

    Attributes:
        images: digests of the images in what was written.
    """

    def __init__(
        self,
        folder: Path,
        images: ImageStore,
        run: str,
        token_text: Callable[[int], str],
        max_bytes: int,
        max_context_tokens: int | None = None,
    ) -> None:
        self._folder = folder
        self._store = images
        self.images: set[str] = set()
        self._run = run
        self._token_text = token_text
        self._max_bytes = max_bytes
        self._max_context_tokens = max_context_tokens
        self._texts: dict[int, str] = {}
        self._used_bytes = 0

    def write(self, prompt: Prompt, trajectory: Trajectory, notes: Mapping[str, Any], num_left_out: int = 0) -> Path:
        """Writes one trajectory, in place of an earlier attempt's.

        Args:
            prompt: what was to be done.
            trajectory: what was done.
            notes: the fields of `RecordedTrajectory` that neither of them has.
            num_left_out: turns and events that were not noted.

        Raises:
            RecordedFailed: it would be too large, or the run's recordings would.
            OSError: the disk is full or the folder cannot be written.
        """
        record = self._record(prompt, trajectory, notes, num_left_out)
        data = record.model_dump_json(exclude_defaults=False).encode("utf-8", "replace")
        if len(data) > MAX_FILE_BYTES:
            raise RecordedFailed(f"it takes {len(data)} bytes, at most {MAX_FILE_BYTES} are written")
        share = self._max_bytes if record.kind == "eval" else self._max_bytes // 2
        if self._used_bytes + len(data) > share:
            raise RecordedFailed("the run's recordings are as large as they may be; raise report.max_mib for more")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{file_name(record.uid)}.json"
        partial = self._folder / f".{path.name}.{os.getpid()}"
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._used_bytes += len(data)
        self.images.update(_DIGEST_IN_URL.findall(data.decode()))
        return path

    def _record(
        self, prompt: Prompt, trajectory: Trajectory, notes: Mapping[str, Any], num_left_out: int
    ) -> RecordedTrajectory:
        left_out = [f"{num_left_out} turns and events beyond the recording's bounds"] if num_left_out else []
        metrics = {str(key): value for key, value in trajectory.metrics.items() if key != "error"}
        cleaner = Cleaner(self._store.put)
        messages = cleaner.messages(trajectory.messages)
        segments = self._segments(trajectory.segments, left_out)
        return RecordedTrajectory.model_validate(
            {
                "format": FORMAT,
                "run": self._run,
                "uid": trajectory.uid,
                "group": trajectory.group,
                "member": trajectory.member,
                "environment": prompt.environment,
                "task": cleaner.plain(prompt.task),
                "seed": prompt.seed,
                "split": prompt.split,
                "outcome": trajectory.outcome,
                "reward": _finite(trajectory.reward),
                "error": cleaner.plain(str(trajectory.metrics.get("error") or "")),
                "metrics": cleaner.plain(metrics),
                "num_turns": trajectory.turns,
                "rewards": [_finite(reward) for reward in trajectory.rewards],
                "max_context_tokens": self._max_context_tokens,
                "messages": messages,
                "segments": segments,
                "left_out": [*left_out, *cleaner.left_out()],
                **notes,
            }
        )

    def _segments(self, segments: Sequence[Segment], left_out: list[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        room = MAX_TOKENS
        for segment in segments:
            length = min(room, len(segment.token_ids))
            if length < len(segment.token_ids):
                left_out.append(f"{len(segment.token_ids) - length} tokens of a segment")
            if length:
                found.append(self._segment(segment, length))
            room -= length
        return found

    def _segment(self, segment: Segment, length: int) -> dict[str, Any]:
        texts = self._texts
        ids = segment.token_ids[:length]
        for token_id in set(ids) - texts.keys():
            texts[token_id] = self._token_text(token_id)
        return {
            "token_ids": ids,
            "texts": [texts[token_id] for token_id in ids],
            "sampled": segment.sampled[:length],
            "logprobs": [
                _finite(round(logprob, 6)) if hit and math.isfinite(logprob) else None
                for logprob, hit in zip(segment.logprobs[:length], segment.sampled[:length], strict=True)
            ],
            "versions": segment.versions[:length],
            "images": [_image(span) for span in segment.images if span.start + span.num_tokens <= length],
        }


class Cleaner:
    """Makes plain, bounded JSON of what agents and environments gave; images become references.

    Args:
        keep_image: stores an image's bytes and returns their digest; its TrainerError leaves the image out.
    """

    def __init__(self, keep_image: Callable[[bytes], str]) -> None:
        self._keep_image = keep_image
        self._room = MAX_MESSAGES_CHARS
        self._num_cut = 0
        self._num_images = 0
        self._num_messages = 0

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Chat messages."""
        self._num_messages = max(0, len(messages) - MAX_MESSAGES)
        return [self.plain(message) for message in messages[:MAX_MESSAGES]]

    def plain(self, value: Any, depth: int = 0) -> Any:
        """Any value as JSON knows it; what is too deep, too long or unknown is cut."""
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return _finite(value)
        if isinstance(value, Mapping):
            if depth >= MAX_DEPTH:
                return self._cut({})
            reference = self._reference(value)
            if reference is not None:
                return reference
            items = list(value.items())[:MAX_ITEMS]
            if len(items) < len(value):
                self._cut(None)
            return {self._text(str(key)): self.plain(inner, depth + 1) for key, inner in items}
        if isinstance(value, list | tuple):
            if depth >= MAX_DEPTH:
                return self._cut([])
            if len(value) > MAX_ITEMS:
                self._cut(None)
            return [self.plain(inner, depth + 1) for inner in value[:MAX_ITEMS]]
        return self._text(value if isinstance(value, str) else str(value))

    def left_out(self) -> list[str]:
        """What was cut, in words."""
        told = (
            (self._num_messages, "messages at the end"),
            (self._num_cut, "texts or parts of messages, cut"),
            (self._num_images, "images that could not be kept"),
        )
        return [f"{num} {what}" for num, what in told if num]

    def _text(self, text: str) -> str:
        kept = text[: max(0, min(MAX_TEXT_CHARS, self._room))].encode("utf-8", "replace").decode()
        self._room -= len(kept)
        return kept if len(kept) == len(text) else self._cut(kept)

    def _cut(self, rest: Any) -> Any:
        self._num_cut += 1
        return rest

    def _reference(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        """An image part as `{"type": "image", "digest": ...}`, or with an `error`; None for everything else."""
        if "image" not in str(part.get("type") or ""):
            return None
        if isinstance(part.get("digest"), str) and _DIGEST_IN_URL.fullmatch(part["digest"]):
            return {"type": "image", "digest": part["digest"]}
        url = next((part[name] for name in ("image_url", "image", "url", "source", "data") if part.get(name)), "")
        if isinstance(url, Mapping):
            url = url.get("url") or url.get("data") or ""
        url = str(url)
        try:
            start = _DATA_URL.match(url)
            if start is not None:
                data = base64.b64decode("".join(url[start.end() :].split()), validate=True)
                return {"type": "image", "digest": self._keep_image(data)}
            found = _DIGEST_IN_URL.search(url)
            if found is not None:
                return {"type": "image", "digest": found.group(1)}
            raise ValueError("an address elsewhere" if url else "no image in the part")
        except (TrainerError, ValueError) as error:
            self._num_images += 1
            return {"type": "image", "error": str(error)[:200], "address": "" if url.startswith("data:") else url[:200]}


def _image(span: ImageSpan) -> dict[str, Any]:
    return {"start": span.start, "num_tokens": span.num_tokens, "digest": span.digest}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
