"""The folder of an evaluation: whole after any crash, played on by one process at a time.

manifest.json    what defines the evaluation, and when it was begun and resumed
results.jsonl    one line for each play that is over, in the order in which they ended
summary.json, report.html    written at the end of each session
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from tide_sdk.evaluation.records import Play, Record, read_record

FORMAT = 1
MANIFEST, RESULTS, LOCK = "manifest.json", "results.jsonl", ".lock"
SYNC_EVERY_S = 2.0
"""What was written longer ago survives also the machine; what was written at all survives this process."""


class EvaluationFailed(Exception):
    """The evaluation cannot go on; the message names the file and the reason."""


class FolderRefused(EvaluationFailed):
    """The folder is not one for this evaluation: it holds another, shall not be resumed, or is played on already."""


class EvaluationFolder:
    """Opens the folder for one session; use it in a `with` block.

    Args:
        path: the folder; made where it is missing.
        definition: everything that decides what the results mean, as plain JSON data.
        resume: go on with what is there; without it a folder that holds an evaluation is refused.
        places: where it is played this time, for people.
        now: a monotonic clock in seconds.

    Attributes:
        key: random, made once; first part of the keys at a gateway.
        session: how many sessions there have been, this one included.
        records: the results that count, without their messages and metrics.
    """

    def __init__(
        self, path: Path, definition: Mapping[str, Any], *, resume: bool, places: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.definition = json.loads(json.dumps(definition))
        self.key = ""
        self.session = 0
        self.records: dict[tuple[str, int], Record] = {}
        self._resume = resume
        self._places = dict(places or {})
        self._file: io.FileIO | None = None
        self._lock: BinaryIO | None = None
        self._synced_s = 0.0

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / LOCK)
            self._open_manifest()
            self._open_results()
        except OSError as error:
            self._close()
            raise EvaluationFailed(f"{error.filename or self.path}: {error.strerror or error}") from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # each line was written already
            self._sync()
        self._close()

    def missing(self, plays: Sequence[Play]) -> list[Play]:
        """The plays that have no result that counts."""
        return [play for play in plays if play.key not in self.records]

    def add(self, record: Record) -> None:
        """Write a result behind the others, in one piece.

        Raises:
            EvaluationFailed: it cannot be written.
            ValueError: the play has a result already.
        """
        if record.key in self.records:
            raise ValueError(f"the play {record.key} has a result already")
        assert self._file is not None, "the folder is not open"
        try:
            _append(self._file, record.line())
            if time.monotonic() - self._synced_s >= SYNC_EVERY_S:
                self._sync()
        except OSError as error:
            raise EvaluationFailed(f"{self.path / RESULTS}: {error.strerror}; free the disk and resume") from error
        self.records[record.key] = _lean(record)

    def forget_if_unused(self) -> bool:
        """Takes a new evaluation back in which nothing was played, so that its folder can be used again.

        Returns:
            Whether it was one. Otherwise nothing is changed.

        Raises:
            EvaluationFailed: a file cannot be removed.
        """
        if self.session != 1 or self.records:
            return False
        try:
            if (self.path / RESULTS).stat().st_size:  # plays that do not count are worth a look too
                return False
            (self.path / RESULTS).unlink()
            (self.path / MANIFEST).unlink()
        except OSError as error:
            raise EvaluationFailed(f"{error.filename or self.path}: {error.strerror or error}") from error
        return True

    def _open_manifest(self) -> None:
        path = self.path / MANIFEST
        sessions: list[Any] = []
        if path.is_file():
            if not self._resume:
                raise FolderRefused(f"{self.path} holds an evaluation already; resume it, or name another folder")
            found = read_manifest(self.path)
            told = [
                f"{name}: {then} then, {now} now"
                for name, then, now in differences(found["definition"], self.definition)
            ]
            if told:
                raise FolderRefused(
                    f"{self.path} holds another evaluation ({'; '.join(told[:5])}); name another folder"
                )
            self.key, sessions = str(found["key"]), list(found["sessions"])
        elif others := sorted(one.name for one in self.path.iterdir() if not one.name.startswith(".")):
            raise FolderRefused(f"{self.path} is not empty ({others[0]}) and no evaluation; name another folder")
        else:
            self.key = f"eval-{secrets.token_hex(6)}"
        sessions.append({"started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **self._places})
        self.session = len(sessions)
        manifest = {"format": FORMAT, "key": self.key, "definition": self.definition, "sessions": sessions}
        write_whole(path, json.dumps(manifest, indent=1) + "\n")

    def _open_results(self) -> None:
        """Keeps the lines of results that count; what is to be played again, and a torn last line, go."""
        path = self.path / RESULTS
        if path.is_file():
            with _replacing(path) as kept:
                for record, line in read_lines(path):
                    if record.final and record.key not in self.records:
                        kept.write(line)
                        self.records[record.key] = _lean(record)
        # Without a buffer: what a full disk did not take would be written by the close, behind everybody's back.
        self._file = path.open("ab", buffering=0)
        _sync_folder(self.path)

    def _sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._synced_s = time.monotonic()

    def _close(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an evaluation.

    Raises:
        EvaluationFailed: there is none, or another release wrote it.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise EvaluationFailed(f"{path}: format {found['format']!r} is not {FORMAT}: another release wrote it")
        if not isinstance(found["definition"], dict) or not isinstance(found["sessions"], list):
            raise TypeError("definition or sessions")
        return cast("dict[str, Any]", found)
    except OSError as error:
        raise EvaluationFailed(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise EvaluationFailed(f"{path}: is no manifest: {error}") from error


def read_lines(path: Path) -> Iterator[tuple[Record, bytes]]:
    """The records of results.jsonl with their lines; a torn last line, which a killed process leaves, is passed over.

    Raises:
        EvaluationFailed: another line is no record.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield read_record(line), line
            except ValueError as error:
                raise EvaluationFailed(f"{path}:{number}: is no result: {error}; repair or remove the line") from error


def differences(then: Any, now: Any, name: str = "") -> list[tuple[str, str, str]]:
    """Where two definitions differ: (dotted name, value then, value now)."""
    if isinstance(then, dict) and isinstance(now, dict):
        old, new = cast("dict[str, Any]", then), cast("dict[str, Any]", now)
        found: list[tuple[str, str, str]] = []
        for key in sorted({*old, *new}):
            found += differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
        return found
    return [] if then == now else [(name, _short(then), _short(now))]


def write_whole(path: Path, text: str) -> None:
    """Write a file that is whole or as it was.

    Raises:
        OSError: it cannot be written.
    """
    with _replacing(path) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


@contextlib.contextmanager
def _replacing(path: Path) -> Generator[BinaryIO]:
    """A file that takes the path's place at the end; where it cannot be written nothing of it is left."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _append(file: io.FileIO, line: bytes) -> None:
    """Writes the whole line, or nothing of it: half a line would only take the room that is missing."""
    begin = file.seek(0, os.SEEK_END)
    left = memoryview(line)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(begin)
        raise


def _lean(record: Record) -> Record:
    """Without what is only read again from the file."""
    kept = {name: getattr(record, name) for name in Record.__dataclass_fields__ if name not in ("messages", "metrics")}
    return Record(**kept)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _locked(path: Path) -> BinaryIO:
    file = path.open("ab")
    try:
        import fcntl  # not everywhere

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return file
    except BlockingIOError as error:
        file.close()
        raise FolderRefused(f"another process plays the evaluation in {path.parent}; wait for its end") from error
    return file


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(PermissionError):  # a folder cannot be opened on Windows
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
