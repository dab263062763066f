"""Runs `tide-gateway doctor` in a test's folder and reads what it says."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from tide_gateway.cli import main

SCRIPTED = f"""
[environments.scripted]
command = [{json.dumps(sys.executable)}, "server.py", "--uds", "{{uds}}"]
"""


class Doctor:
    """Runs the command and keeps what it says."""

    def __init__(self, folder: Path, capsys: Any) -> None:
        self.config = folder / "environments.toml"
        self.config.write_text(SCRIPTED)
        self.folder = folder
        self.database = f"sqlite:///{folder / 'gateway.db'}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._capsys = capsys
        self.text = ""

    def look(self, *words: str, database: str | None = None) -> tuple[int, dict[str, list[dict]]]:
        """The exit code, and the findings by check."""
        argv = ["doctor", "--config", str(self.config), "--database", database or self.database, "--json"]
        code = main([*argv, "--port", str(self.port), *words])
        self.text, err = self._capsys.readouterr()
        assert err == ""
        report = json.loads(self.text)
        assert report["ok"] is (code == 0)
        found: dict[str, list[dict]] = {}
        for finding in report["findings"]:
            found.setdefault(finding["check"], []).append(finding)
            assert finding["level"] == "ok" or finding["fix"], finding
        return code, found

    def one(self, check: str, level: str, words: str, *options: str, **named) -> None:
        """That there is such a finding."""
        code, found = self.look(*options, **named)
        assert any(each["level"] == level and words in each["says"] + each["fix"] for each in found[check]), self.text
        assert level != "fail" or code == 1
