"""The folder of an evaluation on a disk that is full, which a limit on the size of files stands for."""

from __future__ import annotations

import contextlib
import resource

import pytest

from tide_sdk.evaluation.folder import RESULTS, EvaluationFailed, EvaluationFolder, read_lines, write_whole
from tide_sdk.evaluation.records import Record

FIRST, SECOND = (Record(name, 0, "completed", 1.0, 3, error="told " * 20) for name in "ab")


@contextlib.contextmanager
def full_at(num_bytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def kept(folder):
    return [record.id for record, _ in read_lines(folder / RESULTS)]


def test_a_result_that_finds_no_room_leaves_whole_lines_and_can_be_written_later(tmp_path):
    with EvaluationFolder(tmp_path, {}, resume=False) as folder:
        folder.add(FIRST)
        with full_at(len(FIRST.line()) + 20), pytest.raises(EvaluationFailed, match=r"results\.jsonl: File too large"):
            folder.add(SECOND)
        assert (tmp_path / RESULTS).read_bytes() == FIRST.line()
        folder.add(SECOND)
    assert kept(tmp_path) == ["a", "b"]


def test_a_full_disk_is_told_although_the_folder_is_closed_on_it(tmp_path):
    def play() -> None:
        with EvaluationFolder(tmp_path, {}, resume=False) as folder:
            for number in range(100):
                folder.add(Record(str(number), 0, "completed", 1.0, 3, error="told " * 20))

    with full_at(600), pytest.raises(EvaluationFailed, match="File too large"):
        play()
    assert kept(tmp_path) == ["0", "1"]


def test_a_file_that_finds_no_room_stays_as_it_was_and_nothing_lies_beside_it(tmp_path):
    write_whole(tmp_path / "report.html", "before")
    with full_at(10), pytest.raises(OSError, match="File too large"):
        write_whole(tmp_path / "report.html", "after" * 10)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("report.html", "before")]
