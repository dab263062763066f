"""What /proc tells about a tree of processes. Standard library only: the guard runs without our packages.

A tree is found by three marks, because each alone can be lost: the session that its first process leads, a cookie in
the environment that every descendant inherits (also one that began a session of its own), and the parent's pid.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

COOKIE_VARIABLE = "TIDE_PROCESS_COOKIE"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessInfo:
    """One live process. `cpu_s` includes its reaped children."""

    pid: int
    parent: int
    group: int
    session: int
    started_ticks: int
    cpu_s: float


def read_process(pid: int) -> ProcessInfo | None:
    """The process as /proc shows it; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the program's name in brackets and may itself hold spaces and brackets.
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    ticks = sum(int(field) for field in fields[11:15])
    return ProcessInfo(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started_ticks=int(fields[19]),
        cpu_s=ticks / _TICKS_PER_S,
    )


def live_processes() -> list[ProcessInfo]:
    """All live processes that this user may see."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [info for info in found if info is not None]


def has_cookie(pid: int, cookie: str) -> bool:
    """True if the process was started with a cookie that begins with `cookie` in its environment."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # gone, or another user's
    return f"\0{COOKIE_VARIABLE}={cookie}".encode() in b"\0" + environ


def tree(cookie: str, leaders: dict[int, int], *, by_cookie: bool = True) -> list[ProcessInfo]:
    """The live processes of the sessions, of the cookie, and their descendants.

    Args:
        cookie: the value of `COOKIE_VARIABLE` in the tree's environments begins with this.
        leaders: session id -> start ticks of its leader (0 if unknown): a session whose leader's pid now belongs to
            a later process is another one, and is left alone.
        by_cookie: False looks at sessions and parents only.
    """
    everyone = live_processes()
    by_pid = {info.pid: info for info in everyone}
    sessions = {
        session
        for session, ticks in leaders.items()
        if session not in by_pid or not ticks or by_pid[session].started_ticks == ticks
    }
    members = {
        info.pid for info in everyone if info.session in sessions or (by_cookie and has_cookie(info.pid, cookie))
    }
    members.discard(os.getpid())
    grew = True
    while grew:
        grown = {info.pid for info in everyone if info.parent in members} - members
        members |= grown
        grew = bool(grown)
    members.discard(os.getpid())
    return [by_pid[pid] for pid in sorted(members)]


def send(processes: list[ProcessInfo], number: signal.Signals) -> None:
    """Signal each process that is still the one that was listed."""
    for info in processes:
        now = read_process(info.pid)
        if now is None or now.started_ticks != info.started_ticks:
            continue
        try:
            os.kill(info.pid, number)
        except ProcessLookupError:
            continue


def peak_rss_bytes(pid: int) -> int:
    """Highest resident memory of the process so far; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
