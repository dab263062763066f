"""Configuration: `environments.toml`, and the only place that reads the process environment.

Every mistake is a `SettingsError` that names the field and the fix.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_gateway.roles import ROLES, Caller, Role
from tide_gateway.specs import NAME, DockerOptions, EnvironmentSpec, ProcessOptions, RayOptions, RemoteOptions

_OPTIONS: Mapping[str, type[BaseModel]] = {
    "process": ProcessOptions,
    "docker": DockerOptions,
    "remote": RemoteOptions,
    "ray": RayOptions,
}
_TOKEN = re.compile(r"[!-+\--~]{16,256}")
_TOKENS = "TIDE_GATEWAY_TOKENS"
_TOKENS_FILE = "TIDE_GATEWAY_TOKENS_FILE"


class SettingsError(Exception):
    """The configuration is wrong; the message names the field and the fix."""


class GatewaySettings(BaseModel):
    """Everything the gateway is configured with.

    Attributes:
        environments: by name.
        tokens: static token -> caller. Without any, and without keys in the database, everyone on this machine is
            the owner `local`.
        process_environment: the variables that environment servers inherit; the gateway's own are left out, and so
            are libpq's, its database's password among them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environments: dict[str, EnvironmentSpec]
    tokens: dict[str, Caller] = Field(default_factory=dict, repr=False)
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
    inherited = {name: value for name, value in environ.items() if not name.startswith(("TIDE_GATEWAY_", "PG"))}
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


def _read_tokens(environ: Mapping[str, str]) -> dict[str, Caller]:
    text = environ.get(_TOKENS, "")
    source, entries = _TOKENS, [("entry", part) for part in text.split(",")]
    if file := environ.get(_TOKENS_FILE):
        if text:
            raise SettingsError(f"{_TOKENS} and {_TOKENS_FILE} are both set; keep one")
        source = _TOKENS_FILE
        try:
            entries = [("line", line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{_TOKENS_FILE}: cannot read {file}: {error}") from error
    tokens: dict[str, Caller] = {}
    for number, (kind, text) in enumerate(entries, start=1):
        entry = text.strip()
        if not entry or (kind == "line" and entry.startswith("#")):
            continue
        # The entry itself is a secret: only its place is named.
        where = f"{source}: {kind} {number}"
        who, _, token = entry.partition(":")
        owner, _, role = who.partition("/")
        if not NAME.fullmatch(owner) or (role or "agent") not in ROLES or ("/" in who and not role):
            raise SettingsError(f"{where} must be OWNER:TOKEN or OWNER/ROLE:TOKEN; roles are {', '.join(ROLES)}")
        if not _TOKEN.fullmatch(token):
            raise SettingsError(f"{where}: a token has 16 to 256 visible ASCII characters, and no comma")
        if token in tokens:
            raise SettingsError(f"{where} repeats an earlier token")
        tokens[token] = Caller(owner, cast("Role", role or "agent"))
    if source == _TOKENS_FILE and not tokens:
        raise SettingsError(f"{_TOKENS_FILE}: holds no token; write OWNER:TOKEN lines")
    return tokens


def is_loopback(host: str) -> bool:
    """True if only this machine reaches what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, settings: GatewaySettings, *, has_keys: bool) -> None:
    """Refuse a bind that would let strangers in.

    Args:
        host: what to listen on.
        settings: with the static tokens.
        has_keys: whether the database has, or ever had, an API key; callers without one are then refused.

    Raises:
        SettingsError: not a loopback address, and there is neither a token nor a key.
    """
    if not (settings.tokens or has_keys or is_loopback(host)):
        raise SettingsError(
            f"--host {host}: without keys only a loopback address is served; make one with `tide-gateway keys create`, "
            f"or set {_TOKENS}"
        )


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Refuse TLS files that could not be served with.

    Raises:
        SettingsError: one without the other, not readable, not PEM, encrypted, or of two different keys.
    """
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise SettingsError("--tls-cert and --tls-key belong together: give both or none")
    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            path.read_bytes()
        except (OSError, ValueError) as error:
            raise SettingsError(f"{option} {path}: cannot be read: {getattr(error, 'strerror', error)}") from error

    def refuse() -> str:
        raise SettingsError(f"--tls-key {key}: is encrypted, and nobody is there to be asked; give it without")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            words = f"--tls-key {key}: is not the key of --tls-cert {cert}"
        else:
            words = f"--tls-cert {cert}, --tls-key {key}: not a certificate (chain) and its key in PEM"
        raise SettingsError(words) from error
