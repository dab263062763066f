"""An environment whose step never ends, at full CPU, with a tree of children that ignore being asked to stop."""

from __future__ import annotations

import subprocess
import sys

from tide_sdk import Environment, Start, Step

SPIN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"


class Runaway(Environment):
    """Says what it is told, and runs away at `run`, or already at the start."""

    name = "runaway"
    capacity = 8

    def start(self, task):
        """Run away where the task says `start`."""
        if task.task.get("start"):
            self.run_away()
        return Start(["go on"])

    def step(self, message):
        """Run away where the agent says `run`."""
        if message.text == "run":
            self.run_away()
        return Step([message.text])

    def run_away(self):
        """Never return."""
        for in_a_session_of_its_own in (False, True):
            subprocess.Popen([sys.executable, "-I", "-S", "-c", SPIN], start_new_session=in_a_session_of_its_own)
        while True:
            pass
