"""Reads a configuration file: TOML and `a.b=value` overrides into `TrainerSettings`.

An unknown key, a wrong type or an impossible combination raises ConfigurationError, which names the field and the fix,
before anything is started.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tide_trainer.errors import ConfigurationError
from tide_trainer.settings import TrainerSettings


def load(path: str | Path, overrides: Sequence[str] = ()) -> TrainerSettings:
    """Reads a configuration file and applies `a.b=value` overrides (TOML values; bare words are strings).

    Raises:
        ConfigurationError: the file, a key, a type or a combination is wrong; names the field and the fix.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            str(path), f"cannot be read ({error.strerror}); give the path of a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(str(path), f"is not valid TOML: {error}") from error
    for override in overrides:
        _apply(data, override)
    agent = data.setdefault("agent", {})
    if isinstance(agent, dict) and not agent.get("folder"):
        agent["folder"] = str(Path(path).resolve().parent)
    try:
        return TrainerSettings.model_validate(data)
    except ValidationError as error:
        raise _first_error(error) from error


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigurationError(f"--set {override}", "is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.strip().split(".")
    node = data
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigurationError(key.strip(), f"'{section}' is a value, not a section")
    node[last] = value


def _first_error(error: ValidationError) -> ConfigurationError:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "configuration"
    if first["type"] == "extra_forbidden":
        return ConfigurationError(field, "is an unknown key; remove it or correct its spelling")
    if first["type"] == "missing":
        return ConfigurationError(field, "is missing; set it")
    message = str(first["msg"]).removeprefix("Value error, ")
    return ConfigurationError(field, f"{message} (got {first['input']!r})" if first["loc"] else message)
