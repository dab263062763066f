"""metrics.jsonl: one JSON object a line, whole lines only, written as things happen and read back for the report."""

from __future__ import annotations

import json
import math
import numbers
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from tide_trainer.errors import TrainerError

MAX_RECORDS = 50_000
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_READ_RECORDS = 1_000_000

Record = dict[str, Any]


class MetricsFailed(TrainerError):
    """metrics.jsonl cannot be written or read; the message names the file, the reason and what to do."""


class MetricsLog:
    """Writes the records of a run to a file and keeps the newest in memory for the view.

    A line goes out in one unbuffered write. After a failed write the file is cut back to its last whole line, the
    error is raised once, and later records are kept in memory only. An existing file is appended to; a torn last
    line in it is ended first, so that it spoils no new line.

    Args:
        path: the file; its folder must exist.
        clock: monotonic seconds.
        elapsed_s: seconds that the run had already taken before this process, for a continued run.
        max_records: records kept in memory; the oldest go first.

    Raises:
        MetricsFailed: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        elapsed_s: float = 0.0,
        max_records: int = MAX_RECORDS,
    ) -> None:
        self.path = Path(path)
        self._clock = clock
        self._start_s = clock() - elapsed_s
        self._records: deque[Record] = deque(maxlen=max_records)
        self._failed = False
        self._closed = False
        try:
            torn = _ends_torn(self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            if torn:
                self._file.write(b"\n")
        except OSError as error:
            raise MetricsFailed(f"{self.path}: cannot be written ({error.strerror}); free or fix the folder") from error

    @property
    def records(self) -> Sequence[Record]:
        """The newest records, oldest first; a copy."""
        return list(self._records)

    def write(self, event: str, **fields: Any) -> Record:
        """Appends one record and returns it; NaN and infinities become null.

        Args:
            event: what happened, for example `train_step`.
            fields: numbers, strings, booleans, None, and mappings and sequences of these.

        Raises:
            MetricsFailed: the disk is full or the file is gone; raised the first time only.
            TypeError: a field holds something that JSON cannot; names the event and the field.
        """
        clean = {name: _plain(value, f"{event}.{name}") for name, value in fields.items()}
        record: Record = {"event": event, "time_s": round(self._clock() - self._start_s, 3), **clean}
        self._records.append(record)
        if not self._failed and not self._closed:
            self._append(json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        return record

    def close(self) -> None:
        """Closes the file; idempotent. Records written later stay in memory only."""
        if not self._closed:
            self._closed = True
            self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:
                num_written = self._file.write(rest)
                if not num_written:
                    raise OSError(None, "nothing was written")
                rest = rest[num_written:]
        except OSError as error:
            self._failed = True
            note = ""
            try:
                self._file.truncate(end)
            except OSError as second:
                note = f"; its last line may be torn ({second.strerror})"
            raise MetricsFailed(
                f"{self.path}: cannot be written ({error.strerror}); the earlier lines are kept{note}. "
                "Free disk space and start the run again"
            ) from error


def read_metrics(path: str | Path) -> list[Record]:
    """All records of a file, in order.

    A last line without its newline (the writer was killed) is left out. A damaged line elsewhere becomes
    `{"event": "damaged", "line": number}`, so that the reader can say so.

    Raises:
        MetricsFailed: the file cannot be read, or holds more than a million lines.
    """
    records: list[Record] = []
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if number > MAX_READ_RECORDS:
                    raise MetricsFailed(f"{path}: has more than {MAX_READ_RECORDS} lines; split it")
                records.extend(_parse(line, number, torn=not line.endswith(b"\n"), last=not _more(file)))
    except OSError as error:
        raise MetricsFailed(f"{path}: cannot be read ({error.strerror}); give the folder of a run") from error
    return records


def rewind_metrics(path: str | Path, version: int, number: int) -> float:
    """Takes out what a run that goes on from a model version does again, and the end that was none.

    The file as it was stays beside it as `metrics.NUMBER.jsonl`.

    Args:
        path: the file; nothing happens where there is none.
        version: train steps and evaluations of newer ones are taken out.
        number: how often the run has gone on, this time included.

    Returns:
        Seconds that the run had taken by its last record.

    Raises:
        MetricsFailed: it cannot be read or written.
    """
    path = Path(path)
    if not path.is_file():
        return 0.0
    records = read_metrics(path)
    kept = [one for one in records if not _is_rewound(one, version)]
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in kept), encoding="utf-8")
        shutil.copyfile(path, path.with_name(f"{path.stem}.{number}{path.suffix}"))
        part.replace(path)
    except OSError as error:
        raise MetricsFailed(f"{path}: cannot be written ({error.strerror}); free or fix the folder") from error
    return max((float(one.get("time_s") or 0.0) for one in records), default=0.0)


def _is_rewound(record: Record, version: int) -> bool:
    if record["event"] in ("train_step", "evaluation"):
        return int(record.get("model_version") or 0) > version
    return record["event"] == "end"


def _more(file: Any) -> bool:
    return bool(file.peek(1))


def _parse(line: bytes, number: int, *, torn: bool, last: bool) -> list[Record]:
    if not line.strip():
        return []
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict) and isinstance(record.get("event"), str):
        return [record]
    return [] if torn and last else [{"event": "damaged", "line": number}]


def _ends_torn(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value as JSON knows it; numbers that JSON does not know become None."""
    if depth > 32:
        raise TypeError(f"{where}: nested deeper than 32 levels")
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{where}.{key}", depth + 1) for key, inner in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [_plain(inner, where, depth + 1) for inner in islice(value, MAX_READ_RECORDS)]
    raise TypeError(f"{where}: {type(value).__name__} is not JSON; pass numbers, strings, mappings or sequences")
