"""What surrounds a server process: the folder of sockets, its variables, its command, its log."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tide_gateway.specs import EnvironmentSpec
from tide_sdk import codec

MAX_SOCKET_BYTES = 107
"""Longest path of a unix socket."""
NUM_LOGS = 1000
"""Logs of ended servers that are kept, the newest."""
_HARMLESS = re.compile(
    r"PATH|HOME|LANG|LC_.*|TZ|TMPDIR|USER|LOGNAME|SHELL|TERM|VIRTUAL_ENV|PYTHON.*|LD_LIBRARY_PATH|OMP_.*|MKL_.*"
    r"|SSL_CERT_.*"
    # By this whoever runs the gateway finds all that it started.
    r"|TIDE_PROCESS_COOKIE"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TAKEN = re.compile(r"address (is )?already in use|EADDRINUSE|errno 98\b", re.IGNORECASE)


class FolderRefused(OSError):
    """The folder of sockets cannot be trusted or used; the message names it and the fix."""


class RunFolder:
    """The private folder that all replicas of a deployment on a machine share: sockets, and the sign of their life.

    Args:
        path: it is made where it is missing.
        deployment: names of instances are unique in it only.
    """

    def __init__(self, path: Path, deployment: str) -> None:
        self.path = path
        self._deployment = deployment
        self.alive = path / "alive"

    def make(self) -> None:
        """Make the folder, or check the one that is there. Safe to repeat.

        Raises:
            FolderRefused: it is another user's, open to others, no folder, or its path is too long for sockets.
        """
        if len(os.fsencode(self.path)) + 1 + 21 > MAX_SOCKET_BYTES:
            raise FolderRefused(f"{self.path}: too long for unix sockets; set TMPDIR to a shorter path")
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700, parents=True)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            # A name in a shared folder is no proof of who made it.
            raise FolderRefused(f"{self.path}: must be a folder of yours that nobody else can enter; remove it")

    def touch(self) -> None:
        """Show that a gateway lives; makes the folder again where somebody cleaned it away.

        Raises:
            OSError: it cannot be written.
        """
        for _ in range(2):
            try:
                fd = os.open(self.alive, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                self.make()
                continue
            try:
                os.utime(fd)
            finally:
                os.close(fd)
            return

    def places(self, name: str) -> Places:
        """The paths of an instance."""
        digest = hashlib.sha256(f"{self._deployment}/{name}".encode()).hexdigest()[:16]
        return Places(*(self.path / f"{digest}.{kind}" for kind in ("sock", "json", "run")))

    def claim(self, name: str) -> Places:
        """The paths of an instance, and a file that keeps the folder until it is destroyed.

        Raises:
            OSError: the folder cannot be used.
        """
        places = self.places(name)
        self.make()
        try:
            places.run.touch(0o600)
        except FileNotFoundError:  # another replica removed the folder when it was empty
            self.make()
            places.run.touch(0o600)
        return places

    def remove_if_empty(self) -> None:
        """Remove the folder where nothing of any instance is in it."""
        with contextlib.suppress(OSError):
            if [entry.name for entry in self.path.iterdir()] == [self.alive.name]:
                self.alive.unlink()
            self.path.rmdir()


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of one instance.

    Attributes:
        uds: the socket of a server that listens on one.
        announce: where a server that chooses its address writes it.
        run: holds `PID TICKS` of the supervisor; it removes the file once nothing of the tree is left.
    """

    uds: Path
    announce: Path
    run: Path

    def supervisor(self) -> tuple[int, str] | None:
        """Process id and start ticks of the supervisor, None where it is not known."""
        try:
            pid, ticks = self.run.read_text().split()
            return int(pid), ticks
        except (OSError, ValueError):
            return None

    def remove(self) -> None:
        """Remove the files. Safe to repeat, and where there is no folder."""
        for path in (self.uds, self.announce, self.run):
            with contextlib.suppress(OSError):
                path.unlink()


def default_run_dir(deployment: str) -> Path:
    """The same folder for all replicas of a deployment on a machine, in the system's temporary folder."""
    digest = hashlib.sha256(deployment.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"tide-{os.geteuid()}-{digest}"


def server_environ(environ: Mapping[str, str], spec: EnvironmentSpec, mark: tuple[str, str]) -> dict[str, str]:
    """The variables of a server: harmless ones, those that the operator named, the environment's own, and the mark.

    The gateway's own configuration, `TIDE_GATEWAY_*` and `PG*` (its database's password among it), is never passed on.
    """
    named = [re.escape(name).replace(r"\*", ".*") for name in spec.process.inherit]
    wanted = re.compile("|".join([_HARMLESS.pattern, *named]))
    made = {
        name: value
        for name, value in environ.items()
        if wanted.fullmatch(name) and not name.startswith(("TIDE_GATEWAY_", "PG"))
    } | spec.env
    # The commands of our own installation are found even where its environment is not activated.
    made["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), made.get("PATH", os.defpath)])
    made[mark[0]] = mark[1]
    return made


def fill(words: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """The command with its placeholders filled in."""
    filled: list[str] = []
    for word in words:
        for name, value in values.items():
            word = word.replace("{" + name + "}", value)
        filled.append(word)
    return filled


def announced_url(path: Path) -> str | None:
    """The URL that a server announced, None while it has not."""
    try:
        data = codec.loads(path.read_bytes())
    except (OSError, ValueError):
        return None  # not written, or not completely
    url = data.get("url") if isinstance(data, dict) else None
    return url if isinstance(url, str) else None


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now; another may take it before the server does."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tail(path: Path) -> list[str]:
    """The last lines of a log, [] where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 2048))
            return file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return []


def says_port_taken(path: Path) -> bool:
    """Whether a server's last words are that its port was taken."""
    return any(_TAKEN.search(line) for line in tail(path))


def last_words(path: Path) -> str:
    """The last line of a log and where it is, for an error's end."""
    lines = tail(path)
    # What a terminal or a reader of our own log would obey stays out of it.
    last = f"; its last words: {_CONTROL.sub(' ', lines[-1])[:300]}" if lines else ""
    return f"{last} (log: {path})"


def remove_if_empty(path: Path) -> None:
    """Remove a log in which nothing is. Safe to repeat."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


def prune_logs(folder: Path, living: Iterable[str]) -> None:
    """Remove the oldest logs of servers that are gone, beyond `NUM_LOGS`."""
    keep = {f"{name}.log" for name in living}
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.endswith(".log") and entry.name not in keep:
                found.append((entry.stat().st_mtime, Path(entry.path)))
    for _, path in sorted(found)[: max(0, len(found) - NUM_LOGS)]:
        path.unlink(missing_ok=True)
