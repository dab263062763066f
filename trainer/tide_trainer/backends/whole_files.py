"""Files that are whole or absent: published versions and checkpoint folders. No torch.

A checkpoint is a Hugging Face model folder with three files more:

    trainer_state.json          format, model version, last objective
    trainer_state.tensors       the optimizer's moments, the generators' states (safetensors, but named so that no
                                engine that loads the folder takes it for weights)
    extra.json                  what the caller of `save` gave
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tide_trainer.backends import weights_io
from tide_trainer.errors import ConfigurationError, WeightsDiffer
from tide_trainer.model_files import read_json

FORMAT = 1
WEIGHTS = "model.safetensors"
STATE_JSON, STATE_TENSORS, EXTRA_JSON = "trainer_state.json", "trainer_state.tensors", "extra.json"
_OWN = frozenset({STATE_JSON, STATE_TENSORS, EXTRA_JSON})
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt"})
_PREVIOUS = ".previous"
_NUM_KEPT = 2


@contextmanager
def published(directory: str, version: int) -> Iterator[tuple[Path, Path]]:
    """Yields (part, path): write the part; it becomes the version's file at the end.

    Versions before the last two are then removed: a rollout rank may still read the one before.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"v{version:08d}.safetensors"
    part = folder / f".{path.name}.part"
    yield part, path
    part.replace(path)
    others = {int(other.stem[1:]): other for other in folder.glob("v*.safetensors")}  # a warm start's are negative
    older = sorted(number for number in others if number < version)
    for stale in older[: max(0, len(older) - (_NUM_KEPT - 1))]:
        others[stale].unlink(missing_ok=True)


@contextmanager
def checkpoint(directory: str, source: str, place: Mapping[str, Any], extra: Mapping[str, str]) -> Iterator[Path]:
    """Yields a new folder beside `directory`, with all but the tensors; at the end it takes the name.

    The checkpoint before stays as `directory.previous`. A crash at any point leaves one of the two whole; `existing`
    finds it.

    Args:
        directory: the checkpoint's folder.
        source: the model folder whose configuration and tokenizer files are copied.
        place: kept in `trainer_state.json`: at least the model `version`.
        extra: kept in `extra.json`.
    """
    final = Path(directory)
    part, previous = final.with_name(f".{final.name}.part"), final.with_name(final.name + _PREVIOUS)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in sorted(Path(source).iterdir()):
        weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in _OWN:
            shutil.copyfile(file, part / file.name)
    (part / EXTRA_JSON).write_text(json.dumps(dict(extra), indent=1), "utf-8")
    (part / STATE_JSON).write_text(json.dumps({"format": FORMAT, **place}), "utf-8")
    yield part
    for path in [*part.iterdir(), part]:
        _sync(path)
    if final.exists():
        shutil.rmtree(previous, ignore_errors=True)
        final.rename(previous)
    part.rename(final)
    _sync(final.parent)


def existing(directory: str) -> str:
    """The folder, or the checkpoint before it where a crash came between two renames.

    Raises:
        ConfigurationError: neither is a model folder.
    """
    previous = directory.rstrip("/") + _PREVIOUS
    for folder in (directory, previous):
        try:
            if (Path(folder) / WEIGHTS).is_file() or (Path(folder) / "config.json").is_file():
                return folder
        except OSError as error:  # its permissions, or a name that is too long
            raise ConfigurationError("model.path", f"{folder!r} cannot be read ({error.strerror})") from error
    fix = f"{directory!r} is no Hugging Face model folder (no config.json); name one, or '' for a tiny model"
    raise ConfigurationError("model.path", fix)


def newest_whole(directory: str) -> tuple[str, int] | None:
    """The newest checkpoint that is whole, with its model version: the folder's, or the one before it; None without.

    Raises:
        ConfigurationError: another release wrote it.
    """
    for folder in (directory, directory.rstrip("/") + _PREVIOUS):
        if all((Path(folder) / name).is_file() for name in (WEIGHTS, *_OWN)):
            place = saved_place(folder)
            if place is not None:
                return folder, int(place["version"])
    return None


def check_weights(folder: Path) -> None:
    """Sees that the weights are there and not cut off; reads what their files say of themselves, not the weights.

    An engine would find it a minute later, and tell it less well. Of formats that run code nothing is read.

    Raises:
        ConfigurationError: a file is missing or not whole.
    """
    index = folder / f"{WEIGHTS}.index.json"
    try:
        files = sorted(file.name for file in folder.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
        if index.is_file():
            listed = read_json(index).get("weight_map")
            files = sorted({*map(str, listed.values())}) if isinstance(listed, dict) else []
    except OSError as error:
        raise ConfigurationError("model.path", f"{folder} cannot be read ({error.strerror})") from error
    if not files:
        raise ConfigurationError("model.path", f"{folder} has no weights ({WEIGHTS}); copy the model folder again")
    for name in files:
        if name.endswith(".safetensors"):
            try:
                with weights_io.open_tensors(folder / name):
                    pass
            except WeightsDiffer as error:
                raise ConfigurationError("model.path", f"{error}; copy the model folder again") from error


def saved_place(directory: str) -> Mapping[str, Any] | None:
    """What `checkpoint` kept of the place in the run; None for a plain model folder.

    Raises:
        ConfigurationError: another release wrote it, or it is not whole.
    """
    path = Path(directory) / STATE_JSON
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(str(path), f"cannot be read ({error}); copy the checkpoint again") from error
    if not isinstance(found, dict):
        raise ConfigurationError(str(path), "holds no JSON object; copy the checkpoint again")
    if found.get("format") != FORMAT:
        raise ConfigurationError(str(path), f"format {found.get('format')!r} is not {FORMAT}: saved by another release")
    return found


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
