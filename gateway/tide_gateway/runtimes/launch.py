"""Supervises one environment server, so that it outlives the gateway by a bounded time, and none of its tree stays.

    gateway -> supervisor (this script, subreaper, own session) -> server (own session) -> whatever it starts

Started by path with `python -I -S launch.py PARENT OUTLIVE_S ALIVE RUN MEMORY_BYTES PROCESSES FILES argv...`; imports
nothing of ours and little else, since there is one per server. Signals: SIGTERM is passed on to the server, SIGUSR1
kills all at once. It ends as the server ended, and removes RUN once nothing of the tree is left.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

GRACE_S = 3.0
MAX_LOG_BYTES = 64 * 1024 * 1024
_KILL_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_WAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}


def prctl(option: int, value: int) -> None:
    """Set one of the kernel's attributes of this process.

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants(pid: int) -> list[int]:
    """All processes below one, those that left its session too; some are missed while they are being born."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        folder = f"/proc/{waiting.pop()}/task"
        with contextlib.suppress(OSError):
            for thread in os.listdir(folder):
                with open(f"{folder}/{thread}/children") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                waiting += children
    return found


class Supervisor:
    """Waits for the server's end, for signals, and for the gateways' silence.

    Args:
        server: its process, a child of this one and the leader of its session.
        outlive_s: silence of all gateways after which it is stopped, 0 for no such watch.
        alive: the file whose time of change the gateways move.
    """

    def __init__(self, server: int, outlive_s: float, alive: str) -> None:
        self._server = server
        self._outlive_s = outlive_s
        self._alive = alive
        self._status: int | None = None
        self._seen = self._changed()
        self._silence_s = 0.0

    def run(self) -> int:
        """Supervise until nothing is left; the server's wait status."""
        interval_s = min(1.0, self._outlive_s / 5) if self._outlive_s else 1.0
        before_s = time.monotonic()
        kill_at_s = float("inf")
        while self._status is None and before_s < kill_at_s:
            found = signal.sigtimedwait(_WAITED, interval_s)
            number = found.si_signo if found is not None else 0
            now_s = time.monotonic()
            self._reap()
            # A time in which this process did not run itself is no silence of the gateways: they may have been
            # suspended with it.
            self._silence_s += min(now_s - before_s, 2 * interval_s)
            before_s = now_s
            if self._changed() != self._seen:
                self._seen, self._silence_s = self._changed(), 0.0
            if number == signal.SIGTERM:
                self._ask_to_stop()
            elif number == signal.SIGUSR1:
                kill_at_s = 0.0
            elif self._outlive_s and self._silence_s > self._outlive_s and kill_at_s == float("inf"):
                say(f"no gateway for {self._outlive_s:g} s: the environment server is stopped")
                self._ask_to_stop()
                kill_at_s = now_s + GRACE_S
            cap_log()
        self._kill_all()
        return self._status if self._status is not None else signal.SIGKILL

    def _changed(self) -> int:
        try:
            return os.stat(self._alive).st_mtime_ns
        except OSError:
            return 0

    def _reap(self) -> bool:
        """Take note of who ended; False where no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._server:
                self._status = status

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._server, signal.SIGTERM)
        # A frozen process cannot even stop.
        signal_all(signal.SIGCONT)

    def _kill_all(self) -> None:
        until_s = time.monotonic() + _KILL_S
        while time.monotonic() < until_s:
            # Orphans become children of this process: there is an end to it.
            signal_all(signal.SIGKILL)
            if not self._reap():
                return
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
        raise TimeoutError("some of the server's processes do not die")


def signal_all(number: int) -> None:
    """Send a signal to all processes below this one."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def say(words: str) -> None:
    """Write a line into the log; a full disk is no reason to die."""
    with contextlib.suppress(OSError):
        os.write(2, f"{words}\n".encode())


def cap_log() -> None:
    """Begin the log anew once it is too long. All writers append, so none leaves a hole or loses its place."""
    with contextlib.suppress(OSError):
        if os.fstat(1).st_size > MAX_LOG_BYTES:
            os.ftruncate(1, 0)
            say(f"the log was longer than {MAX_LOG_BYTES} bytes and begins anew")


def become_server(supervisor: int, limits: list[int], command: list[str]) -> int:
    """Bind the life to the supervisor's, give up what is not needed, and execute the command."""
    os.setsid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        return 1  # it died before the signal was set
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o077)
    for kind, value in zip((resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE), limits, strict=True):
        if value:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    # What Python changed for itself, execve would pass on.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)  # noqa: S606 (an argv list from the operator's configuration)
    except OSError as error:
        say(f"cannot execute {command[0]!r}: {error.strerror}")
        return 127


def main(words: list[str]) -> int:
    """Start the server and supervise it; the exit code is the server's."""
    parent, outlive_s, alive, run = int(words[0]), float(words[1]), words[2], words[3]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if outlive_s == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
        if os.getppid() != parent:
            return 1  # it died before the signal was set
    with open("/proc/self/stat") as stat, open(run, "w") as file:
        file.write(f"{os.getpid()} {stat.read().rpartition(')')[2].split()[19]}")
    supervisor = os.getpid()
    server = os.fork()
    if server == 0:
        os._exit(become_server(supervisor, [int(word) for word in words[4:7]], words[7:]))
    status = Supervisor(server, outlive_s, alive).run()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(run)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(supervisor, number)
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
