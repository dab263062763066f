"""The recorded trajectories of a run's folder: found, listed, and their pages written."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tide_trainer.report.formats import MISSING
from tide_trainer.report.pages import ReportFailed, write_page
from tide_trainer.report.recorded import RecordedFailed, RecordedTrajectory, file_name, read_recorded
from tide_trainer.report.replay import pauses
from tide_trainer.report.replay_page import render_trajectory

FOLDER = "trajectories"
IMAGES = "images"
MAX_FILES = 10_000
MAX_PAGES = 64
MAX_ALL_PAGES_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PageLink:
    """One recorded trajectory in a list; `href` leads to its page from the run's folder."""

    href: str
    kind: str
    outcome: str
    reward: str
    num_turns: int
    num_pauses: int


def recorded_files(run_dir: Path) -> list[Path]:
    """The recordings of a run, by name. Raises RecordedFailed if the folder cannot be read."""
    folder = run_dir / FOLDER
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == ".json" and not path.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordedFailed(f"{folder}: cannot be read ({error.strerror})") from error
    return found[:MAX_FILES]


def find_recorded(run_dir: Path, uid: str | None) -> RecordedTrajectory:
    """One recorded trajectory, by its uid or its file's name; None is the newest.

    Raises:
        RecordedFailed: there is none, or its file cannot be read; the message names others.
    """
    files = recorded_files(run_dir)
    if not files:
        raise RecordedFailed(
            f"{run_dir / FOLDER}: no trajectory is recorded; give the folder of a run, and see [report] and "
            "evaluation.num_samples in its configuration"
        )
    if uid is None:
        return read_recorded(max(files, key=lambda path: path.stat().st_mtime_ns))
    names = {path.stem: path for path in files}
    found = names.get(file_name(uid)) or names.get(uid.removesuffix(".json"))
    if found is None:
        near = difflib.get_close_matches(file_name(uid), names, 3, 0.0)
        told = ", ".join(_uid_of(names[name]) for name in near)
        raise RecordedFailed(f"{uid!r} is not among the {len(files)} recorded trajectories; near it: {told}")
    return read_recorded(found)


def _uid_of(path: Path) -> str:
    """The uid in a file, or the name of one that cannot be read."""
    try:
        return read_recorded(path).uid
    except RecordedFailed:
        return path.stem


def write_pages(run_dir: Path, first: Iterable[str]) -> tuple[dict[str, PageLink], str]:
    """Writes the pages of a run's recorded trajectories, while they are few and small enough.

    Args:
        run_dir: the run's folder.
        first: uids whose pages come first.

    Returns:
        Links by uid, and a sentence about what has no page (empty if all have one).
    """
    try:
        files = {path.stem: path for path in recorded_files(run_dir)}
    except RecordedFailed as error:
        return {}, str(error)
    wanted = [file_name(uid) for uid in first]
    order = [name for name in dict.fromkeys([*wanted, *files]) if name in files]
    links: dict[str, PageLink] = {}
    problems: list[str] = []
    room = MAX_ALL_PAGES_BYTES
    for name in order[:MAX_PAGES]:
        try:
            record = read_recorded(files[name])
            page = render_trajectory(record, run_dir / IMAGES)
            room -= len(page)
            if room < 0:
                break
            write_page(run_dir / FOLDER / f"{name}.html", page)
        except (RecordedFailed, ReportFailed) as error:
            problems.append(str(error))
            continue
        links[record.uid] = link(record, f"{FOLDER}/{name}.html")
    num_others = len(order) - len(links) - len(problems)
    if num_others:
        problems.append(f"{num_others} more are recorded: tide-train trajectory {run_dir.name} --list")
    return links, " ".join(problems[:5])


def link(record: RecordedTrajectory, href: str) -> PageLink:
    """A recorded trajectory as a row of a list."""
    reward = MISSING if record.reward is None else f"{record.reward:.3g}"
    return PageLink(href, record.kind, record.outcome, reward, record.num_turns, len(pauses(record)))


def main_trajectory(run_dir: Path, uid: str | None, *, only_list: bool = False, out: Path | None = None) -> int:
    """`tide-train trajectory`: writes a page and prints its path, or lists; the exit code (2: nothing to show)."""
    try:
        if only_list:
            print(_listed(run_dir))
            return 0
        record = find_recorded(run_dir, uid)
        target = out or run_dir / FOLDER / f"{file_name(record.uid)}.html"
        print(write_page(target, render_trajectory(record, run_dir / IMAGES)))
    except (RecordedFailed, ReportFailed) as error:
        print(f"tide-train trajectory: {_printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def _listed(run_dir: Path) -> str:
    rows: list[Sequence[str]] = [("trajectory", "kind", "outcome", "reward", "turns", "pauses", "versions")]
    damaged: list[str] = []
    for path in recorded_files(run_dir):
        try:
            record = read_recorded(path)
        except RecordedFailed as error:
            damaged.append(str(error))
            continue
        row = link(record, "")
        versions = ",".join(map(str, record.versions)) or MISSING
        rows.append((record.uid, row.kind, row.outcome, row.reward, str(row.num_turns), str(row.num_pauses), versions))
    if len(rows) == 1 and not damaged:
        raise RecordedFailed(f"{run_dir / FOLDER}: no trajectory is recorded")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(map(_printable, [*lines, *damaged]))


def _printable(text: str) -> str:
    """The text without what a terminal would obey; a file's words are not trusted."""
    return "".join(char if char.isprintable() else "?" for char in text)
