"""Ask the kernel to end this process with its parent, then become the wanted program.

Run by file name with `python -I -S` so that it costs one bare interpreter start (about 10 ms CPU) and not a package
import. A `preexec_fn` would do the same inside the forked child, but it forbids `vfork`, is unsafe beside threads, and
uvloop runs it on its own loop. The setting survives `exec`, and the pid stays the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """`child.py PARENT_PID PROGRAM [ARG ...]`: exit code 126 if the parent is gone, 127 if the program is missing."""
    parent_pid, argv = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed with errno {ctypes.get_errno()}")
    if os.getppid() != parent_pid:
        sys.exit(126)  # the parent died before the setting held
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is the point
    except OSError as error:
        print(f"cannot run {argv[0]}: {error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
