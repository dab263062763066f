"""Safetensors files without torch: the header, the raw bytes of each tensor, and their checksums."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tide_trainer.errors import WeightsDiffer

_MAX_HEADER_BYTES = 100 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor of a file.

    Attributes:
        dtype: safetensors' name of the element type, for example F32.
        shape: its sizes.
        data: its little-endian contiguous bytes; valid while the file is open.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@contextmanager
def open_tensors(path: str | Path) -> Iterator[dict[str, RawTensor]]:
    """Opens a safetensors file: name -> tensor, mapped and not copied.

    Raises:
        WeightsDiffer: the file is missing or not whole.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise WeightsDiffer(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        if os.fstat(file.fileno()).st_size < 8:
            raise WeightsDiffer(f"{path}: not a safetensors file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            tensors: dict[str, RawTensor] = {}
            try:
                for name, dtype, shape, begin, end in _entries(path, view):
                    tensors[name] = RawTensor(dtype, shape, view[begin:end])
                yield tensors
            finally:
                # The mapping cannot be closed under a view, and an error's traceback keeps views alive.
                for tensor in tensors.values():
                    tensor.data.release()
                view.release()


def checksum(data: memoryview | bytes) -> str:
    """SHA-256 (hex) of a tensor's little-endian contiguous bytes."""
    return hashlib.sha256(data).hexdigest()


def verify(tensors: Mapping[str, RawTensor], checksums: Mapping[str, str]) -> None:
    """Checks that a file holds exactly the announced tensors with the announced bytes.

    Raises:
        WeightsDiffer: naming the missing, extra or differing tensors.
    """
    check_names(tensors.keys(), checksums.keys(), "the file")
    differing = [name for name, tensor in tensors.items() if checksum(tensor.data) != checksums[name]]
    if differing:
        raise WeightsDiffer(f"checksum differs in the file: {_some(differing)}")


def check_names(present: object, wanted: object, where: str) -> None:
    """Checks that two sets of tensor names are equal. Raises WeightsDiffer naming the differences."""
    have, want = set(present), set(wanted)  # type: ignore[call-overload]
    if not want:
        raise WeightsDiffer("the update names no tensor")
    if have != want:
        missing, extra = sorted(want - have), sorted(have - want)
        raise WeightsDiffer(f"{where} lacks {_some(missing)} and has beyond the update {_some(extra)}")


def _entries(path: str | Path, view: memoryview) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    length = int.from_bytes(bytes(view[:8]), "little")
    if length > min(_MAX_HEADER_BYTES, len(view) - 8):
        raise WeightsDiffer(f"{path}: not a whole safetensors file")
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            entries.append((name, str(entry["dtype"]), tuple(entry["shape"]), begin, end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsDiffer(f"{path}: not a safetensors header ({error})") from error
    outside = [name for name, _, _, begin, end in entries if not 8 + length <= begin <= end <= len(view)]
    if outside:
        raise WeightsDiffer(f"{path}: {_some(outside)} outside the file; it was cut off")
    return entries


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
