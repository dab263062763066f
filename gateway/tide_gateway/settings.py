"""Configuration: `environments.toml`, and the only place that reads the process environment.

Every mistake is a `SettingsError` that names the field and the fix.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_gateway.specs import NAME, DockerOptions, EnvironmentSpec, ProcessOptions, RayOptions, RemoteOptions

_OPTIONS: Mapping[str, type[BaseModel]] = {
    "process": ProcessOptions,
    "docker": DockerOptions,
    "remote": RemoteOptions,
    "ray": RayOptions,
}
_TOKENS = "TIDE_GATEWAY_TOKENS"
_TOKENS_FILE = "TIDE_GATEWAY_TOKENS_FILE"


class SettingsError(Exception):
    """The configuration is wrong; the message names the field and the fix."""


class GatewaySettings(BaseModel):
    """Everything the gateway is configured with.

    Attributes:
        environments: by name.
        tokens: token -> owner; empty means that everyone on this machine is the owner `local`.
        process_environment: the variables that environment servers inherit; the gateway's own are left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environments: dict[str, EnvironmentSpec]
    tokens: dict[str, str] = Field(default_factory=dict, repr=False)
    process_environment: dict[str, str] = Field(default_factory=dict, repr=False)


def load_settings(path: Path, environ: Mapping[str, str] | None = None) -> GatewaySettings:
    """Read `environments.toml` and the process environment.

    Args:
        path: the file.
        environ: the process environment; None reads the real one.

    Raises:
        SettingsError: the first thing that is wrong.
    """
    environ = os.environ if environ is None else environ
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; name the file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    inherited = {name: value for name, value in environ.items() if not name.startswith("TIDE_GATEWAY_")}
    return GatewaySettings(
        environments=parse_environments(data, str(path)),
        tokens=_read_tokens(environ),
        process_environment=inherited,
    )


def parse_environments(data: Mapping[str, Any], source: str = "environments.toml") -> dict[str, EnvironmentSpec]:
    """The registered environments of a parsed file.

    Raises:
        SettingsError: naming the field and the fix.
    """
    unknown = sorted(set(data) - {"environments"})
    if unknown:
        raise SettingsError(f"{source}: unknown key {unknown[0]!r}; write [environments.NAME] tables")
    tables = data.get("environments")
    if not isinstance(tables, dict) or not tables:
        raise SettingsError(f"{source}: no environment; write at least one [environments.NAME] table")
    specs: dict[str, EnvironmentSpec] = {}
    for name, table in tables.items():
        where = f"{source}: environments.{name}"
        if not isinstance(table, dict):
            raise SettingsError(f"{where}: must be a table")
        if "name" in table and table["name"] != name:
            raise SettingsError(f"{where}.name: differs from the table's name; leave it out")
        try:
            spec = EnvironmentSpec.model_validate({**table, "name": name})
        except ValidationError as error:
            raise SettingsError(f"{where}.{_first_fault(error)}") from error
        problem = spec.problem()
        if problem is not None:
            raise SettingsError(f"{where}.{problem}")
        specs[name] = spec
    return specs


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in fault["loc"] if part != "[key]")
    if fault["type"] == "extra_forbidden":
        fields = EnvironmentSpec.model_fields if len(fault["loc"]) == 1 else _OPTIONS[str(fault["loc"][0])].model_fields
        return f"{field}: unknown key; known are {', '.join(sorted(fields))}"
    return f"{field}: {fault['msg']}"


def _read_tokens(environ: Mapping[str, str]) -> dict[str, str]:
    text = environ.get(_TOKENS, "")
    source = _TOKENS
    if file := environ.get(_TOKENS_FILE):
        if text:
            raise SettingsError(f"{_TOKENS} and {_TOKENS_FILE} are both set; keep one")
        source = _TOKENS_FILE
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{_TOKENS_FILE}: cannot read {file}: {error}") from error
    tokens: dict[str, str] = {}
    entries = [part.strip() for part in text.replace("\n", ",").split(",")]
    for number, entry in enumerate((e for e in entries if e and not e.startswith("#")), start=1):
        owner, found, token = entry.partition(":")
        if not found or not NAME.fullmatch(owner) or len(token) < 16 or not token.isascii() or " " in token:
            # The entry itself is a secret: only its place is named.
            raise SettingsError(f"{source}: entry {number} must be OWNER:TOKEN, the token 16 characters or more")
        if token in tokens:
            raise SettingsError(f"{source}: entry {number} repeats an earlier token")
        tokens[token] = owner
    if source == _TOKENS_FILE and not tokens:
        raise SettingsError(f"{_TOKENS_FILE}: holds no token; write OWNER:TOKEN lines")
    return tokens


def check_bind(host: str, settings: GatewaySettings) -> None:
    """Refuse a bind that would let strangers in.

    Raises:
        SettingsError: not a loopback address, and no token is set.
    """
    if settings.tokens or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise SettingsError(f"--host {host}: without tokens only a loopback address is served; set {_TOKENS}")
