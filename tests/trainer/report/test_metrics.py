from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tide_trainer.report.metrics import MetricsFailed, MetricsLog, read_metrics


def test_every_record_is_a_whole_line_on_disk_at_once(tmp_path: Path, clock: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, clock=clock)
    clock.now_s += 1.5
    log.write("train_step", model_version=1, success=0.5)
    assert json.loads(path.read_bytes()) == {"event": "train_step", "time_s": 1.5, "model_version": 1, "success": 0.5}
    assert path.read_bytes().endswith(b"\n")
    log.close()


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path, clock: Any) -> None:
    with MetricsLog(tmp_path / "m", clock=clock) as log:
        log.write("train_step", loss=float("nan"), cpu_s={"a": float("inf"), "b": 1.0}, list=[-float("inf")])
    (record,) = read_metrics(tmp_path / "m")
    assert record["loss"] is None
    assert record["cpu_s"] == {"a": None, "b": 1.0}
    assert record["list"] == [None]


def test_a_value_that_is_not_json_names_the_event_and_the_field(tmp_path: Path, clock: Any) -> None:
    with MetricsLog(tmp_path / "m", clock=clock) as log:
        with pytest.raises(TypeError, match=r"train_step\.roles\.local:0: object is not JSON"):
            log.write("train_step", roles={"local:0": object()})
        assert log.records == []
    assert (tmp_path / "m").read_bytes() == b""


def test_memory_is_bounded_and_the_file_is_not(tmp_path: Path, clock: Any) -> None:
    with MetricsLog(tmp_path / "m", clock=clock, max_records=3) as log:
        for index in range(10):
            log.write("phase", phase=str(index))
        assert [record["phase"] for record in log.records] == ["7", "8", "9"]
    assert len(read_metrics(tmp_path / "m")) == 10


class FullDisk:
    """A file that takes half of a line and then has no space."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.num_calls = 0

    def write(self, data: Any) -> int:
        self.num_calls += 1
        if self.num_calls % 2:
            return self.file.write(bytes(data)[:10])
        raise OSError(28, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_is_told_once_and_leaves_the_earlier_lines_whole(tmp_path: Path, clock: Any) -> None:
    log = MetricsLog(tmp_path / "m", clock=clock)
    log.write("phase", phase="training")
    log._file = FullDisk(log._file)  # type: ignore[assignment]
    with pytest.raises(MetricsFailed, match="No space left on device"):
        log.write("train_step", model_version=1)
    log.write("train_step", model_version=2)
    log.close()
    assert [record["event"] for record in read_metrics(tmp_path / "m")] == ["phase"]
    assert (tmp_path / "m").read_bytes().count(b"\n") == 1
    assert (tmp_path / "m").read_bytes().endswith(b"}\n")
    assert [record.get("model_version") for record in log.records] == [None, 1, 2]


def test_a_write_cut_short_by_the_system_is_completed(tmp_path: Path, clock: Any) -> None:
    log = MetricsLog(tmp_path / "m", clock=clock)
    real = log._file

    class Short:
        def write(self, data: Any) -> int:
            return real.write(bytes(data)[:7])

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    log._file = Short()  # type: ignore[assignment]
    log.write("phase", phase="training")
    log.close()
    assert read_metrics(tmp_path / "m")[0]["phase"] == "training"


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"event":"phase","phase":"training"}\n{"event":"train_st')
    assert read_metrics(path) == [{"event": "phase", "phase": "training"}]


def test_a_file_with_a_torn_last_line_can_be_continued(tmp_path: Path, clock: Any) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"event":"phase"}\n{"event":"train_st')
    with MetricsLog(path, clock=clock, elapsed_s=60.0) as log:
        log.write("phase", phase="training")
    assert read_metrics(path) == [
        {"event": "phase"},
        {"event": "damaged", "line": 2},
        {"event": "phase", "time_s": 60.0, "phase": "training"},
    ]


@pytest.mark.parametrize("line", [b"[1]", b"nonsense", b'{"no":"event"}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(line + b'\n{"event":"phase"}\n')
    assert read_metrics(path) == [{"event": "damaged", "line": 1}, {"event": "phase"}]


def test_a_missing_folder_or_file_is_a_clear_error(tmp_path: Path, clock: Any) -> None:
    with pytest.raises(MetricsFailed, match="cannot be written"):
        MetricsLog(tmp_path / "nowhere" / "m", clock=clock)
    with pytest.raises(MetricsFailed, match="cannot be read"):
        read_metrics(tmp_path / "m")


def test_closing_twice_is_fine_and_later_records_stay_in_memory(tmp_path: Path, clock: Any) -> None:
    log = MetricsLog(tmp_path / "m", clock=clock)
    log.close()
    log.close()
    log.write("phase", phase="stopping")
    assert len(log.records) == 1
    assert read_metrics(tmp_path / "m") == []
