"""Each registered environment: whether its servers could be launched, reached, and are of the right kind."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

from tide_gateway.doctor.findings import Check, Finding, fail, ok, warn
from tide_gateway.runtimes.docker_checks import EngineFacts, ask_engine, can_freeze, has_network, image_problem, urls_of
from tide_gateway.runtimes.docker_sdk import EngineRefused, SdkMissing, in_thread
from tide_gateway.runtimes.process_marks import MARK, Marks
from tide_gateway.runtimes.process_places import server_environ
from tide_gateway.runtimes.remote_channel import RemoteChannel, Unfit, health_of, read_token
from tide_gateway.runtimes.remote_guard import resolve
from tide_gateway.specs import DockerOptions, EnvironmentSpec, RemoteOptions

CONNECT_S = 5.0
MAX_AT_ONCE = 32
_RAY_PORT = 6379


def checks_of(
    specs: Sequence[EnvironmentSpec], environ: Mapping[str, str], deployment: str, servers: frozenset[str] | None
) -> list[Check]:
    """The checks of all environments, of the engines that they name, and of what is left without a row.

    Args:
        specs: the environments.
        environ: what their servers may inherit.
        deployment: the name of all that the gateways make, "" where there is none yet.
        servers: the servers that have a row, None where that is not known.
    """
    checks: list[Check] = []
    urls: dict[str, list[EnvironmentSpec]] = {}
    for spec in specs:
        name = f"environment {spec.name}"
        if spec.runtime == "process":
            checks.append(Check(name, lambda s=spec, n=name: _command(n, s, environ)))
        elif spec.runtime == "remote":
            checks.append(Check(name, lambda s=spec, n=name: _remote(n, s), limit_s=30.0))
        elif spec.runtime == "ray":
            checks.append(Check(name, lambda s=spec, n=name: _ray(n, s, environ)))
        elif spec.runtime == "fake":
            checks.append(Check(name, lambda n=name: _fake(n)))
        for url in urls_of(spec.docker, environ) if spec.docker is not None else ():
            urls.setdefault(url, []).append(spec)
    for url, named in urls.items():
        checks.append(Check(f"engine {url}", lambda u=url, n=named: _engine(u, n, environ, deployment, servers), 40.0))
    if deployment and servers is not None:
        checks.append(Check("orphans", lambda: _processes(deployment, servers)))
    return checks


async def _command(name: str, spec: EnvironmentSpec, environ: Mapping[str, str]) -> list[Finding]:
    program = spec.command[0]
    path = server_environ(environ, spec, (MARK, ""))["PATH"]
    found = shutil.which(program, path=path)
    if found is not None:
        return [ok(name, f"process: {found}")]
    # With a slash it is a path already, from the gateway's own folder.
    if os.sep in program and os.path.exists(program):  # noqa: ASYNC240 (nothing is served)
        return [fail(name, f"command: {program} cannot be executed", f"chmod +x {program}")]
    return [fail(name, f"command: {program} is not found", "install it, or write its whole path")]


async def _fake(name: str) -> list[Finding]:
    return [warn(name, "fake: scripted, for tests only", "name a runtime")]


async def _remote(name: str, spec: EnvironmentSpec) -> list[Finding]:
    options, gate = spec.remote, asyncio.Semaphore(MAX_AT_ONCE)
    assert options is not None

    async def ask(url: str) -> Finding:
        async with gate:
            return await _server(name, url, options, spec.tasks_per_server)

    return list(await asyncio.gather(*(ask(url) for url in options.urls)))


async def _server(name: str, url: str, options: RemoteOptions, tasks: int) -> Finding:
    fix = f"start it, or correct [environments.{name.partition(' ')[2]}.remote]"
    try:
        token = read_token(options.token_file) if options.token_file else ""
        tls = ssl.create_default_context(cafile=options.ca_file or None) if url.startswith("https:") else None
    except (Unfit, OSError, ValueError) as error:
        return fail(name, f"{error}", "name a readable file")
    channel = RemoteChannel(url, options, resolve, tls=tls, token=token)
    try:
        async with asyncio.timeout(2 * CONNECT_S):
            health = await health_of(channel)
    except TimeoutError:
        return fail(name, f"{url}: no answer within {2 * CONNECT_S:g} s", fix)
    except Unfit as error:
        return fail(name, str(error), fix)
    finally:
        await channel.aclose()
    if health.capacity < tasks:
        return warn(name, f"{url}: holds {health.capacity} tasks, not the {tasks} configured", "lower capacity")
    return ok(name, f"{url}: serves {health.environment}, {health.tasks} of {health.capacity} tasks")


async def _ray(name: str, spec: EnvironmentSpec, environ: Mapping[str, str]) -> list[Finding]:
    asked = (spec.ray.address if spec.ray else "") or environ.get("RAY_ADDRESS", "")
    host, _, port = asked.removeprefix("ray://").rpartition(":")
    if asked in ("", "auto", "local"):
        return [ok(name, "ray: the cluster of this machine, or one of its own")]
    host, number = (host, int(port)) if host and port.isdigit() else (asked, _RAY_PORT)

    def connect() -> None:
        socket.create_connection((host.strip("[]"), number), CONNECT_S).close()

    try:
        await in_thread(connect, 2 * CONNECT_S)
    except OSError as error:
        words = f"ray: nothing answers at {asked}: {error or type(error).__name__}"
        return [fail(name, words, "start the cluster, or correct ray.address (RAY_ADDRESS)")]
    return [ok(name, f"ray: {asked} takes connections")]


async def _engine(
    url: str,
    specs: Sequence[EnvironmentSpec],
    environ: Mapping[str, str],
    deployment: str,
    servers: frozenset[str] | None,
) -> list[Finding]:
    name = f"engine {url}"
    try:
        facts = await ask_engine(url, environ, deployment)
    except SdkMissing as error:
        return [fail(name, str(error), "pip install 'tiderl[docker]'")]
    except (EngineRefused, OSError) as error:
        fix = "start it, let the gateway's user reach its socket, or correct docker.engines (DOCKER_HOST)"
        return [fail(name, f"does not answer: {error}", fix)]
    cgroup = f", cgroup v{facts.cgroup}" if facts.cgroup else ""
    found = [ok(name, f"Docker {facts.version}, {facts.platform}{cgroup}")]
    if facts.without:
        words = f"cannot limit {', '.join(facts.without)}"
        found.append(warn(name, words, "enable those control groups in its machine's kernel"))
    for spec in specs:
        assert spec.docker is not None
        found += await _docker(spec, spec.docker, url, facts, environ)
    orphans = sorted(facts.instances - servers) if servers is not None else []
    return [*found, _orphans(f"containers on {url}", orphans)] if orphans else found


async def _docker(
    spec: EnvironmentSpec, options: DockerOptions, url: str, facts: EngineFacts, environ: Mapping[str, str]
) -> list[Finding]:
    name, local = f"environment {spec.name}", url.startswith("unix:")
    found: list[Finding] = []
    if options.connect == "uds" and not local:
        found.append(fail(name, f'connect = "uds" needs an engine of this machine, not {url}', 'take "bridge"'))
    if spec.freeze and local and not can_freeze(facts.cgroup):
        found.append(fail(name, "freeze: this kernel has no freezer", "enable it, or set freeze = false"))
    if options.runtime and options.runtime not in facts.runtimes:
        words = f"docker.runtime: the engine {url} has no {options.runtime}"
        found.append(fail(name, words, f"register it there; it has {', '.join(sorted(facts.runtimes))}"))
    for mount in options.mounts:
        source = mount.partition(":")[0]
        if local and not Path(source).exists():  # noqa: ASYNC240 (nothing is served)
            found.append(fail(name, f"docker.mounts: {source} is not there", "make it, or correct the path"))
    try:
        problem, note = await image_problem(url, environ, options, facts.platform)
        if options.network and not await has_network(url, environ, options.network):
            found.append(fail(name, f"docker.network: the engine {url} has no {options.network}", "make it there"))
    except (EngineRefused, OSError) as error:
        return [*found, fail(name, f"the engine {url} does not say what it has: {error}", "see its log")]
    if problem:
        found.append(fail(name, problem, "build or pull it there, or correct docker.image, pull and platform"))
    return found or [ok(name, f"docker: {note or f'image {options.image!r} is on {url}'}")]


async def _processes(deployment: str, servers: frozenset[str]) -> list[Finding]:
    orphans = sorted(set(await Marks(deployment).find()) - servers)
    return [_orphans("processes", orphans)] if orphans else [ok("orphans", "no server process without a row")]


def _orphans(what: str, names: Sequence[str]) -> Finding:
    words = f"{len(names)} {what} that no row names, first: {names[0]}"
    return warn("orphans", words, "a running gateway removes them within 5 s; else start one")
