"""Runs in the child: bind its life to the gateway's, then become the environment server.

Started as a script by path with `python -I -S launch.py PARENT_PID argv...`; imports nothing of ours.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Set the death signal, check that the parent still lives, and execute the command."""
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the signal was set.
    if os.getppid() != parent:
        return 1
    try:
        os.execvp(command[0], command)  # noqa: S606 (an argv list from the operator's configuration)
    except OSError as error:
        print(f"cannot execute {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
