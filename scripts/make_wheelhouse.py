"""Fills build/wheelhouse with the packages that images need, so that they build without reaching any index.

Usage: python scripts/make_wheelhouse.py [--extras gateway,docker,postgres,environments] [--python 3.11]

It is for the base image of scripts/make_base_image.py and this machine's processor. Where pyproject.toml and the
arguments have not changed it does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from make_base_image import python_name

ROOT = Path(__file__).resolve().parents[1]
WHEELHOUSE = ROOT / "build" / "wheelhouse"
EXTRAS = "gateway,docker,postgres,environments"
BUILD_BACKEND = "hatchling>=1.27"
PIP_TIMEOUT_S = 600


def make_wheelhouse(folder: Path, extras: str, python: str) -> bool:
    """Fill the folder, whole or not at all; an older one is replaced.

    Args:
        folder: where the wheels go.
        extras: comma-separated extras of pyproject.toml.
        python: version of the Python that will install them, for example `3.11`.

    Returns:
        False where the folder was up to date.

    Raises:
        SystemExit: pip failed; its last lines say why.
    """
    wanted = hashlib.sha256(f"{extras} {python} {(ROOT / 'pyproject.toml').read_text()}".encode()).hexdigest()
    stamp = folder / "stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        own, filled = Path(temporary, "own"), Path(temporary, "wheelhouse")
        # Its own wheel tells pip what the extras mean; the image builds another from the source.
        _pip("wheel", "--no-deps", "--wheel-dir", str(own), str(ROOT))
        wheel = next(own.glob("*.whl"))
        target = ["--only-binary=:all:", "--python-version", python, "--dest", str(filled)]
        _pip("download", *target, f"{wheel}[{extras}]", BUILD_BACKEND)
        (filled / wheel.name).unlink()
        (filled / "stamp").write_text(wanted)
        shutil.rmtree(folder, ignore_errors=True)
        filled.rename(folder)
    return True


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, cwd=ROOT)
    if done.returncode:
        sys.exit(f"make_wheelhouse: pip {arguments[0]} failed:\n{done.stderr[-4000:]}")


def main() -> None:
    """Reads the command line and fills the folder."""
    parser = argparse.ArgumentParser(description="Fill build/wheelhouse for images that are built offline.")
    parser.add_argument("--extras", default=EXTRAS, help=f"extras of pyproject.toml (default: {EXTRAS})")
    parser.add_argument("--python", help="version of the image's Python (default: this machine's Debian one)")
    arguments = parser.parse_args()
    python = arguments.python or python_name().removeprefix("python")
    made = make_wheelhouse(WHEELHOUSE, arguments.extras, python)
    num_wheels = len(list(WHEELHOUSE.glob("*.whl")))
    print(f"{WHEELHOUSE}: {num_wheels} wheels{'' if made else ', up to date'}")


if __name__ == "__main__":
    main()
