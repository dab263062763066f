"""Files and folders: who can read and write them, whether there is room, who holds the lock of a SQLite file."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.engine import URL

from tide_gateway.doctor.findings import Finding, fail, ok, warn
from tide_gateway.runtimes.process_places import MAX_SOCKET_BYTES, default_run_dir

MIN_FREE_BYTES, LOW_FREE_BYTES = 100 * 1024**2, 2 * 1024**3
LOW_FREE_FILES = 10_000
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "fuse.sshfs"})


def look_at_files(url: URL | None, data: Path | None) -> list[Finding]:
    """The database's file and the data folder. Blocks."""
    found: list[Finding] = []
    places: dict[str, Path] = {}
    if url is not None and url.get_backend_name() == "sqlite":
        path = Path(os.path.realpath(str(url.database)))
        places["the database"] = path.parent
        found += _database_file(path)
    if data is not None:
        places["the data folder"] = data
        found += _data_folder(data)
    seen: set[int] = set()
    for what, folder in places.items():
        there = _existing(folder)
        if there.stat().st_dev not in seen:
            seen.add(there.stat().st_dev)
            found += _room(what, there)
    return found


def look_at_lock(url: URL) -> tuple[list[Finding], int]:
    """Who holds a SQLite file's lock, and its process id, 0 for nobody. Blocks."""
    path = Path(os.path.realpath(str(url.database)))
    lock = path.with_name(path.name + ".lock")
    if not lock.exists():
        return [ok("lock", "no gateway uses the file")], 0
    pid = holder_of(lock)
    if pid:
        return [ok("lock", f"a gateway uses the file: pid {pid}")], pid
    return [ok("lock", f"{lock} was left by a gateway that is gone; the next one takes it")], 0


def holder_of(lock: Path) -> int:
    """The process that holds a lock on the file, by the kernel's list; 0 where none does. Takes no lock itself."""
    found = lock.stat()
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK" or words[5].rpartition(":")[2] != str(found.st_ino):
            continue
        pid = int(words[4])
        # Layered file systems name another device there than `stat` does.
        if words[5].rpartition(":")[0] == device or _has_open(pid, lock):
            return pid
    return 0


def _has_open(pid: int, path: Path) -> bool:
    try:
        return any(os.path.realpath(entry.path) == str(path) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def look_at_sockets(deployment: str) -> list[Finding]:
    """The folder of sockets of `process` and `docker` servers. Blocks."""
    folder = default_run_dir(deployment or "0" * 12)
    if len(os.fsencode(folder)) + 22 > MAX_SOCKET_BYTES:
        return [fail("sockets", f"{folder}: too long for unix sockets", "set TMPDIR to a shorter path")]
    if not deployment or not folder.exists():
        fine = os.access(folder.parent, os.W_OK | os.X_OK)
        words = f"made in {folder.parent} when a server starts"
        return [ok("sockets", words) if fine else fail("sockets", f"{folder.parent}: cannot be written", "set TMPDIR")]
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        words = f"{folder}: is not a folder that only this user can enter"
        return [fail("sockets", words, "run the doctor as the gateway's user, or remove the folder")]
    return [ok("sockets", f"{folder}")]


def _database_file(path: Path) -> list[Finding]:
    found: list[Finding] = []
    if not path.parent.is_dir():
        return [fail("database file", f"{path.parent}: no such folder", "make it, or name another file")]
    if not os.access(path.parent, os.W_OK | os.X_OK):
        found.append(fail("database file", f"{path.parent}: cannot be written", "SQLite keeps its log beside the file"))
    kind = _kind_of_mount(path.parent)
    if kind in _NETWORK:
        words = f"{path.parent} is on a network ({kind}), where SQLite's log does not work"
        found.append(fail("database file", words, "take a local disk, or PostgreSQL"))
    if path.exists():
        if not os.access(path, os.R_OK | os.W_OK):
            found.append(fail("database file", f"{path}: cannot be written", "run as the gateway's user"))
        open_ones = [each for each in (path, Path(f"{path}-wal"), Path(f"{path}-shm")) if _is_open(each)]
        if open_ones:
            words = f"others of this machine can read {', '.join(map(str, open_ones))}: bodies of all owners' tasks"
            found.append(warn("database file", words, f"chmod 600 {' '.join(map(str, open_ones))}"))
    return found or [ok("database file", f"{path} is private and can be written" if path.exists() else f"{path}")]


def _data_folder(data: Path) -> list[Finding]:
    if not data.exists():
        if not data.parent.is_dir():
            return [fail("data folder", f"{data.parent}: no such folder", "make it, or name another with --data")]
        if not os.access(data.parent, os.W_OK | os.X_OK):
            return [fail("data folder", f"{data.parent}: cannot be written", "name another with --data")]
        return [ok("data folder", f"{data} is made by `serve`")]
    found: list[Finding] = []
    for folder in (data, data / "logs", data / "blobs"):
        if not folder.exists():
            continue
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            found.append(fail("data folder", f"{folder}: cannot be written", "run as the gateway's user, or chown it"))
        elif folder == data and _is_open(folder):
            words = f"others of this machine can enter {folder}: logs and bodies of all owners' tasks"
            found.append(warn("data folder", words, f"chmod 700 {folder}"))
    return found or [ok("data folder", f"{data} is private and can be written")]


def _room(what: str, folder: Path) -> list[Finding]:
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    words = f"{free_bytes / 1024**3:.1f} GiB free where {what} is ({folder})"
    fix = "make room, or lower --retention-days; a full disk stops all tasks"
    if free_bytes < MIN_FREE_BYTES:
        return [fail("disk", words, fix)]
    if free_bytes < LOW_FREE_BYTES:
        return [warn("disk", words, fix)]
    if status.f_files > 0 and status.f_favail < LOW_FREE_FILES:
        return [warn("disk", f"{words}, but room for {status.f_favail} files only", fix)]
    return [ok("disk", words)]


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & 0o077)
    except FileNotFoundError:
        return False


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _kind_of_mount(folder: Path) -> str:
    """The kind of the file system that a folder is on, "" where that is not known."""
    best, kind = "", ""
    try:
        lines: Sequence[str] = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    real = os.path.realpath(folder)
    for line in lines:
        _, at, name, *_ = line.split()
        at = at.replace("\\040", " ")
        inside = real == at or real.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best):
            best, kind = at, name
    return kind
