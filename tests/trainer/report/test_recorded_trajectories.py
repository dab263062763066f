from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from loop_fakes import trajectory
from recorded_examples import browser_task, png

from tide_trainer.errors import ImageFailed
from tide_trainer.images import ImageStore
from tide_trainer.report import recording_file
from tide_trainer.report.recorded import RecordedFailed, RecordedTrajectory, file_name, read_recorded
from tide_trainer.report.recording_file import Cleaner, RecordingFiles
from tide_trainer.types import ImageSpan, Prompt, Segment, Trajectory

PROMPT = Prompt("train/0", "toy", {"level": 2}, 7, "train")
NOTES = {"kind": "train", "attempt": 0, "temperature": 1.0, "started_at": "2026-03-01T10:00:00Z",
         "duration_s": 2.5, "end_version": 3}  # fmt: skip


def files(folder: Path, max_bytes: int = 1 << 20) -> RecordingFiles:
    return RecordingFiles(folder / "trajectories", ImageStore(folder / "images"), "run", lambda i: f"<{i}>", max_bytes)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    segment = Segment((5, 6, 9, 9, 7), (False, False, False, False, True), (0, 0, 0, 0, -0.25), (-1, -1, -1, -1, 3),
                      (ImageSpan(2, 2, "a" * 64),))  # fmt: skip
    done = Trajectory("train/0/1", "train/0", 1, (segment,), 0.5, "completed", 1, 3, {"error": "late", "x": 1},
                      ({"role": "user", "content": "go"},), (0.5,))  # fmt: skip
    path = files(tmp_path).write(PROMPT, done, NOTES)
    record = read_recorded(path)
    assert path.name == "train.0.1.json"
    assert (record.uid, record.seed, record.reward, record.error) == ("train/0/1", 7, 0.5, "late")
    assert record.metrics == {"x": 1}
    assert record.rewards == (0.5,)
    assert record.segments[0].texts == ("<5>", "<6>", "<9>", "<9>", "<7>")
    assert record.segments[0].logprobs == (None, None, None, None, -0.25)
    assert record.segments[0].images[0].num_tokens == 2
    assert record.versions == (3,)
    assert RecordedTrajectory.model_validate_json(record.model_dump_json()) == record
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "format: Input should be 1; this version reads format 1"),
        ({"new_field": 1}, "new_field: Extra inputs"),
        ({"turns": [{"turn": 0}]}, "turns.0.call_s: Field required"),
        ({"reward": "much"}, "reward: Input should be a valid number"),
    ],
)
def test_a_file_that_is_not_of_the_format_is_refused_by_field(tmp_path: Path, change, told: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(browser_task() | change))
    with pytest.raises(RecordedFailed) as caught:
        read_recorded(path)
    assert str(caught.value).startswith(f"{path}: {told}")


def test_segments_whose_lists_or_images_do_not_fit_are_refused(tmp_path: Path) -> None:
    for spoil, told in (
        (lambda segment: segment["logprobs"].pop(), "logprobs has"),
        (lambda segment: segment["images"].append({"start": 10**6, "num_tokens": 1, "digest": "a" * 64}), "images.0"),
        (lambda segment: segment["images"].append({"start": 0, "num_tokens": 1, "digest": "../x"}), "digest"),
    ):
        data = browser_task()
        spoil(data["segments"][0])
        (tmp_path / "x.json").write_text(json.dumps(data))
        with pytest.raises(RecordedFailed, match=told):
            read_recorded(tmp_path / "x.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": 1e999}'])
def test_a_damaged_file_is_an_error_and_not_a_crash(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(RecordedFailed, match=r"x\.json"):
        read_recorded(tmp_path / "x.json")
    with pytest.raises(RecordedFailed, match="cannot be read"):
        read_recorded(tmp_path / "nothing.json")


def test_names_of_files_are_safe_and_apart() -> None:
    assert file_name("eval/0/sampled/3") == "eval.0.sampled.3"
    odd = ["../../etc/passwd", "a.b/c", "a/b.c", "a b", "", "x" * 500, "train/\ud800", "/train/1"]
    names = [file_name(uid) for uid in odd]
    assert len(set(names)) == len(odd)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") for name in names)
    assert not any(name.startswith(".") or ".." in name or len(name) > 120 for name in names)


def test_training_takes_at_most_half_of_the_room_and_evaluation_the_rest(tmp_path: Path) -> None:
    size = files(tmp_path).write(PROMPT, trajectory(), NOTES).stat().st_size
    kept = files(tmp_path, max_bytes=3 * size)
    kept.write(PROMPT, trajectory(member=1), NOTES)
    with pytest.raises(RecordedFailed, match=r"report\.max_mib"):
        kept.write(PROMPT, trajectory(member=2), NOTES)
    kept.write(PROMPT, trajectory(member=3), NOTES | {"kind": "eval"})
    with pytest.raises(RecordedFailed, match=r"report\.max_mib"):
        kept.write(PROMPT, trajectory(member=4), NOTES | {"kind": "eval", "attempt": 100_000})
    assert not (tmp_path / "trajectories" / "train.0.2.json").exists()


def test_a_trajectory_beyond_the_bounds_is_cut_and_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recording_file, "MAX_TOKENS", 3)
    monkeypatch.setattr(recording_file, "MAX_TEXT_CHARS", 100)
    long = trajectory()
    long = Trajectory("a/1", "a", 1, (long.segments[0], long.segments[0]), 1.0, "completed", 1, 0,
                      messages=({"role": "user", "content": "x" * 101},))  # fmt: skip
    record = read_recorded(files(tmp_path).write(PROMPT, long, NOTES, num_left_out=2))
    assert [len(segment.token_ids) for segment in record.segments] == [3]
    assert record.messages[0]["content"] == "x" * 100
    assert record.left_out == (
        "2 turns and events beyond the recording's bounds", "1 tokens of a segment", "4 tokens of a segment",
        "1 texts or parts of messages, cut",
    )  # fmt: skip


def test_images_of_messages_become_references_to_the_store(tmp_path: Path) -> None:
    data = png(4, 4, 1)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    store = ImageStore(tmp_path)
    digest = store.put(data)
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "input_image", "image_url": url},
        {"type": "image_url", "image_url": {"url": f"tide-blob:sha256:{digest}?type=image/png"}},
        {"type": "image_url", "image_url": {"url": "https://elsewhere.example/x.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}},
        {"type": "image"},
    ]
    (message,) = Cleaner(store.put).messages([{"role": "user", "content": parts}])
    shown = {"type": "image", "digest": digest}
    assert message["content"][:4] == [parts[0], shown, shown, shown]
    assert [part["error"][:10] for part in message["content"][4:]] == ["an address", "Only base6", "no image i"]
    assert url not in json.dumps(message)


def test_an_image_that_cannot_be_kept_is_left_out_with_its_reason() -> None:
    def full(data: bytes) -> str:
        raise ImageFailed("the disk is full")

    cleaner = Cleaner(full)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    (message,) = cleaner.messages([{"role": "user", "content": [part]}])
    assert message["content"][0]["error"] == "the disk is full"
    assert cleaner.left_out() == ["1 images that could not be kept"]


def test_hostile_messages_become_plain_json() -> None:
    deep: dict = {}
    inner = deep
    for _ in range(50):
        inner["x"] = {}
        inner = inner["x"]
    odd = {"role": "user", "content": "\ud800", "n": float("nan"), "deep": deep, "o": object(), 3: list(range(9000))}
    cleaner = Cleaner(lambda data: "")
    (found,) = cleaner.messages([odd])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["n"] is None
    assert len(found["3"]) == recording_file.MAX_ITEMS
    assert cleaner.left_out()
