"""A real PostgreSQL server of a test session's own: a temporary folder, a unix socket, no network.

It can be stopped, killed and frozen. PostgreSQL refuses to run as root, so as root it runs as user postgres.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

USER = "tide"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
PR_SET_PDEATHSIG = 1
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "deadlock_timeout": "200ms",
    "autovacuum": "off",
    "log_min_messages": "warning",
}


class NoServer(Exception):
    """PostgreSQL is not installed, or did not start; the message holds its log."""


def programs_folder() -> Path:
    """The folder that holds initdb and postgres themselves, not a wrapper of either."""
    candidates = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    candidates.sort(key=lambda folder: int(folder.parent.name) if folder.parent.name.isdigit() else 0, reverse=True)
    if which := shutil.which("initdb"):
        candidates.append(Path(which).resolve().parent)
    if config := shutil.which("pg_config"):
        asked = subprocess.run([config, "--bindir"], capture_output=True, text=True, timeout=10, check=False)
        candidates.append(Path(asked.stdout.strip() or "/nowhere"))
    for folder in candidates:
        # initdb looks for `postgres` beside itself; a script is a wrapper that some machines put first in PATH.
        if all((folder / name).is_file() and _is_binary(folder / name) for name in ("initdb", "postgres")):
            return folder
    raise NoServer("no PostgreSQL server on this machine: apt-get install postgresql")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) != b"#!"


class PostgresServer:
    """One server and its folder. `start` may be called again after `stop` or `kill`: the data stay.

    Args:
        fsync: False for speed; then nothing survives a crash of the machine, but all survives a kill of the server.
        settings: further lines of postgresql.conf.
    """

    def __init__(self, *, fsync: bool = False, settings: dict[str, str] | None = None) -> None:
        self._programs = programs_folder()
        self._account = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        # A socket's path has at most 107 bytes; temporary folders of tests may be longer and closed to `postgres`.
        self.folder = Path(tempfile.mkdtemp(prefix="tide-pg-", dir="/tmp" if os.path.isdir("/tmp") else None))
        self._data = self.folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._num_databases = 0
        self._settings = SETTINGS | {"unix_socket_directories": str(self.folder)} | (settings or {})
        if not fsync:
            self._settings |= {"fsync": "off", "full_page_writes": "off"}
        if self._account is not None:
            os.chown(self.folder, self._account.pw_uid, self._account.pw_gid)
        try:
            self._initdb()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """The id of its first process, whose children serve the connections."""
        assert self._process is not None, "PostgreSQL does not run"
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        """The URL of a database of this server."""
        return f"postgresql+psycopg://{USER}@/{database}?host={self.folder}"

    def start(self) -> None:
        """Start it and wait until it answers. Does nothing where it runs.

        Raises:
            NoServer: it does not answer in time.
        """
        if self._process is not None:
            return
        # The kernel stops the server (SIGQUIT: at once) with the test process, even if that is killed.
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), "-D", str(self._data)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, int(signal.SIGQUIT)), **self._identity(),
            )  # fmt: skip
        _wait(self._answers, START_TIMEOUT_S, lambda: f"PostgreSQL did not start:\n{self.log()[-4000:]}")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: SIGINT cuts connections off, SIGQUIT does not even write what is in memory. Safe to repeat."""
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    def kill(self) -> None:
        """kill -9 of the server and all its processes, as a power cut of its machine would be."""
        if self._process is None:
            return
        doomed = [self._process.pid, *self._children()]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None
        _wait(lambda: not any(_runs(pid) for pid in doomed), STOP_TIMEOUT_S, lambda: "PostgreSQL does not die")

    def restart(self) -> None:
        """Stop it, connections and all, and start it again."""
        self.stop()
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let nothing of the server run, as a machine that hangs: its sockets stay open and nobody answers."""
        assert self._process is not None
        pids = [self._process.pid, *self._children()]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove its folder. Safe to repeat."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """What the server wrote."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def create_database(self, template: str | None = None) -> str:
        """A new database, empty or a copy of `template` (to which nobody may be connected); returns its URL."""
        self._num_databases += 1
        name = f"t{self._num_databases}"
        self.execute(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}"' if template else ""))
        return self.url(name)

    def empty_database(self, url: str, tables: Iterable[str]) -> None:
        """Delete all rows of the tables, after whoever is still connected was disconnected."""
        name = url.split("@/")[1].split("?")[0]
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
        self.execute(others, (name,))
        self.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY", database=name)

    def drop_database(self, url: str) -> None:
        """Remove a database, whoever is connected to it."""
        name = url.split("@/")[1].split("?")[0]
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, statement: str, parameters: Sequence[Any] = (), *, database: str = "postgres") -> list[tuple]:
        """Run one statement outside of any transaction and return its rows."""
        import psycopg

        where = {"host": str(self.folder), "user": USER, "dbname": database, "connect_timeout": 10}
        with psycopg.connect(**where, autocommit=True) as connection:
            found = connection.execute(statement, parameters or None)  # type: ignore[arg-type]
            return found.fetchall() if found.description else []

    def _initdb(self) -> None:
        command = [str(self._programs / "initdb"), "-D", str(self._data), "-U", USER, "-A", "trust", "-E", "UTF8"]
        made = subprocess.run(
            [*command, "--no-locale", "--no-sync"],
            capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False, cwd=self.folder, **self._identity(),
        )  # fmt: skip
        if made.returncode != 0:
            raise NoServer(f"initdb failed:\n{made.stdout}\n{made.stderr}")
        lines = [f"{name} = '{value}'\n" for name, value in self._settings.items()]
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(lines)

    def _identity(self) -> dict[str, Any]:
        environ = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TZ": "UTC"}
        if self._account is None:
            return {"env": environ}
        return {"env": environ, "user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _answers(self) -> bool:
        import psycopg

        assert self._process is not None
        if self._process.poll() is not None:
            self._process = None
            raise NoServer(f"PostgreSQL ended:\n{self.log()[-4000:]}")
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _children(self) -> list[int]:
        assert self._process is not None
        pid = self._process.pid
        try:
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except FileNotFoundError:
            return []


def _runs(pid: int) -> bool:
    try:
        # What nobody has waited for yet is dead all the same.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise NoServer(what())
        time.sleep(0.02)
