"""Token payloads of finished groups: files named by the SHA-256 of what they hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tide_trainer.types import Group, ImageSpan, Segment, Trajectory


class PayloadLost(Exception):
    """A payload file is missing or is not what its name says; its prompt has to be sampled again."""


class Payloads:
    """A folder of payloads; what is stored twice is one file.

    Args:
        folder: made when the first payload is stored.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def store(self, group: Group) -> str:
        """Writes a group's trajectories; returns the name. A crash leaves the whole file or none under it."""
        data = json.dumps([asdict(trajectory) for trajectory in group.trajectories]).encode()
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(data)
            partial.replace(path)
        return digest

    def read(self, digest: str) -> tuple[Trajectory, ...]:
        """The trajectories of a stored group. Raises PayloadLost."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PayloadLost(f"{path}: cannot be read ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise PayloadLost(f"{path}: does not hold what its name says")
        return tuple(_trajectory(one) for one in json.loads(data))

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / f"{digest}.json"


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    segments = tuple(
        Segment(
            token_ids=tuple(one["token_ids"]),
            sampled=tuple(one["sampled"]),
            logprobs=tuple(one["logprobs"]),
            versions=tuple(one["versions"]),
            images=tuple(ImageSpan(**span) for span in one["images"]),
        )
        for one in data["segments"]
    )
    rest = {"messages": tuple(data["messages"]), "rewards": tuple(data["rewards"])}
    return Trajectory(**{**data, **rest, "segments": segments})
