"""The machine: Python and its packages, the limit of open files, TLS, the address and who answers there."""

from __future__ import annotations

import http.client
import platform
import resource
import socket
import ssl
import sys
import time
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path

from tide_gateway.doctor.findings import Finding, fail, ok, refused, warn
from tide_gateway.settings import SettingsError, check_tls
from tide_gateway.specs import EnvironmentSpec
from tide_sdk.serve import MAX_FILES
from tide_sdk.wire import CONTRACT_HEADER, CONTRACT_VERSION

PACKAGES = ("tiderl", "fastapi", "uvicorn", "sqlalchemy", "alembic", "pydantic", "orjson", "httptools", "uvloop")
OPTIONAL = ("uvloop", "httptools")
EXTRAS: Mapping[str, tuple[str, str]] = {
    "postgresql": ("psycopg", "postgres"),
    "docker": ("docker", "docker"),
    "ray": ("ray", "ray"),
}
"""What is used -> its library and our extra."""
MIN_PYTHON = (3, 11)
EXPIRES_SOON_S = 14 * 86400.0
ANSWER_S = 5.0
_OWN_FILES = 256
_FILES_A_TASK = 2
"""The connection of who calls, and the one to its environment server."""
_FILES_A_SERVER = 4


def look_at_packages(uses: Collection[str]) -> list[Finding]:
    """Python, the packages, and the extras of what is used (keys of `EXTRAS`)."""
    versions = {name: _version(name) for name in PACKAGES}
    words = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    found = [ok("packages", f"Python {platform.python_version()}, {words}")]
    if sys.version_info[:2] < MIN_PYTHON:
        found.append(fail("packages", f"Python {platform.python_version()} is too old", "take 3.11 or newer"))
    for name in [name for name, version in versions.items() if not version]:
        words = f"{name} is not installed"
        slower = warn("packages", f"{words}: the gateway is slower", "pip install 'tiderl[gateway]'")
        found.append(slower if name in OPTIONAL else fail("packages", words, "pip install 'tiderl[gateway]'"))
    for use in sorted(uses):
        library, extra = EXTRAS[use]
        version = _version(library)
        missing = fail("extras", f"{use} needs the library {library}", f"pip install 'tiderl[{extra}]'")
        found.append(ok("extras", f"{use}: {library} {version}") if version else missing)
    return found


def look_at_file_limit(specs: Collection[EnvironmentSpec]) -> list[Finding]:
    """Whether all tasks at once have the descriptors that they need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    tasks, servers = sum(spec.capacity for spec in specs), sum(spec.servers for spec in specs)
    need = _OWN_FILES + _FILES_A_TASK * tasks + _FILES_A_SERVER * servers
    words = f"{limit} at most; {tasks} tasks on {servers} servers need about {need}"
    if need > limit:
        fix = "raise the hard limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of docker), or lower capacity"
        return [fail("open files", words, fix)]
    return [ok("open files", words)]


def look_at_tls(cert: Path | None, key: Path | None) -> list[Finding]:
    """Whether https can be spoken with the files, and for how long. Blocks."""
    try:
        check_tls(cert, key)
    except SettingsError as error:
        return [refused("tls", error)]
    if cert is None or key is None:
        return [ok("tls", "plain http, as asked")]
    try:
        ends_s = expires_s(cert, key)
    except ssl.SSLCertVerificationError as error:
        return [fail("tls", f"{cert}: {error.verify_message}", "renew it; the gateway reads it at its start")]
    left_s = ends_s - time.time()
    day = time.strftime("%Y-%m-%d", time.gmtime(ends_s))
    if left_s < EXPIRES_SOON_S:
        words = f"{cert} expires on {day}, in {left_s / 86400:.0f} days"
        return [warn("tls", words, "renew it, and restart the gateways in turn: they read it at their start")]
    return [ok("tls", f"{cert} is valid until {day}")]


def expires_s(cert: Path, key: Path) -> float:
    """When the certificate expires, seconds since the epoch, found by speaking TLS with it in memory.

    Raises:
        SSLCertVerificationError: it is not valid now.
    """
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(cert, key)
    client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # It vouches for itself: who signed it is the callers' concern, and its name too.
    client_side.check_hostname = False
    client_side.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_side.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = client.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(found["notAfter"]))


def look_at_address(host: str, port: int, *, tls: bool, pid: int, replicas: Collection[str] | None) -> list[Finding]:
    """Whether the port is free, or a gateway answers there. Blocks.

    Args:
        host, port: where the gateway listens, or shall.
        tls: https is spoken.
        pid: the gateway that holds the SQLite file's lock, 0 for none.
        replicas: the gateways of the database, None where that is not known.
    """
    where = f"{host}:{port}"
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (where it listens, not what we bind)
    try:
        socket.create_connection((target, port), ANSWER_S).close()
    except socket.gaierror as error:
        return [fail("address", f"--host {host}: {error.strerror}", "name an address of this machine")]
    except OSError as error:
        if pid:
            words = f"nothing answers at {where} ({error}), but a gateway (pid {pid}) uses the database"
            return [warn("address", words, "name its --host and --port, or see its log")]
        return _free(host, port)
    try:
        return _gateway(target, port, where, tls=tls, replicas=replicas)
    except (OSError, http.client.HTTPException) as error:
        words = f"what listens at {where} does not answer as a gateway does: {error or type(error).__name__}"
        return [fail("address", words, "stop it, name another --port, or --tls-cert if it speaks https")]


def _gateway(target: str, port: int, where: str, *, tls: bool, replicas: Collection[str] | None) -> list[Finding]:
    health, _, body = _get(target, port, "/healthz", tls=tls)
    # Whatever it answers to that: the answer names the contract.
    _, contract, _ = _get(target, port, "/start", tls=tls)
    if health != 200 or not contract:
        words = f"what listens at {where} is no gateway (GET /healthz: {health})"
        return [fail("address", words, "stop it, or name another --port")]
    found = [ok("address", f"a gateway answers at {where}: {body}")]
    if replicas is not None and not any(f'"{name}"' in body for name in replicas):
        words = f"a gateway of another database answers at {where}: {body}"
        found = [fail("address", words, "name another --port, or its --database")]
    if contract != str(CONTRACT_VERSION):
        words = f"it speaks contract {contract}, this version {CONTRACT_VERSION}"
        found.append(fail("address", words, "run the doctor of its version"))
    ready, _, body = _get(target, port, "/readyz", tls=tls)
    if ready not in (200, 404):
        found.append(warn("address", f"it is not ready ({ready}): {body}", "wait, or see its log"))
    return found


def _get(target: str, port: int, path: str, *, tls: bool) -> tuple[int, str, str]:
    """Status, contract version and the beginning of the body."""
    if tls:
        # Only whether it answers is asked for; nothing is told to it.
        context = ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(target, port, timeout=ANSWER_S, context=context)
    else:
        connection = http.client.HTTPConnection(target, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.getheader(CONTRACT_HEADER, ""), answer.read(300).decode("utf-8", "replace")
    finally:
        connection.close()


def _free(host: str, port: int) -> list[Finding]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            words = f"--host {host} --port {port}: cannot listen: {getattr(error, 'strerror', None) or error}"
            return [fail("address", words, "name another --port, or an address of this machine")]
    return [ok("address", f"{host}:{port} is free; no gateway answers there")]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
