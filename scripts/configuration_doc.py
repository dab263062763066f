"""Writes docs/configuration.md from the settings' own descriptions, so that the two cannot differ.

python scripts/configuration_doc.py            print it
python scripts/configuration_doc.py --write    rewrite docs/configuration.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tide_trainer.settings import TrainerSettings

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration of `tide-train`

A TOML file with the sections below; `examples/quickstart.toml` is one. A key that is left out has its default.
On the command line `--set section.key=value` overrides a key (a TOML value; a bare word is a string). An unknown key,
a wrong type or an impossible combination ends with exit code 2, before anything is started, and names the key and the
fix. `--dry-run` checks a file and prints it as resolved.

The gateway's bearer token is read from the environment variable `TIDE_GATEWAY_TOKEN`.

This page is written by `make configuration-doc`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, field in TrainerSettings.model_fields.items():
        parts.extend(_section(name, field.annotation))
    return "\n".join(parts)


def _section(name: str, model: Any) -> list[str]:
    lines = [f"## [{name}]", "", _first_paragraph(model), "", "| key | default | meaning |", "| --- | --- | --- |"]
    below: list[str] = []
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            below.extend(["", *_section(f"{name}.{key}", field.annotation)[:-1]])
            continue
        default = "required" if field.is_required() else f"`{_value(field.get_default(call_default_factory=True))}`"
        lines.append(f"| `{key}` | {default} | {_cell(field.description)} |")
    if name == "scheduler":
        note = "`priors` is a table by environment: `[scheduler.priors.NAME]` with the keys of `default_prior`."
        lines += ["", note]
    return [*lines, *below, ""]


def _first_paragraph(model: type[BaseModel]) -> str:
    text = " ".join((model.__doc__ or "").strip().split("\n\n")[0].split())
    # The trainer's own sections begin with their name, which is the heading here.
    text = text.partition("]: ")[2] if text.startswith("[") else text
    return text[:1].upper() + text[1:]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return str(list(value))
    return str(value)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def main() -> int:
    """Prints or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite docs/configuration.md")
    if parser.parse_args().write:
        TARGET.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
