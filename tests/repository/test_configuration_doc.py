from __future__ import annotations

import subprocess
import sys


def test_the_configuration_page_is_what_the_settings_say(tree):
    script = tree.root / "scripts" / "configuration_doc.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True).stdout
    recorded = (tree.root / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert recorded == printed, "a setting changed: run `make configuration-doc` and read its diff"
