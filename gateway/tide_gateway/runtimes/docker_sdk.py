"""What every use of the `docker` library needs: that it is there, threads with deadlines, and two kinds of errors."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_CANCEL_WAIT_S = 15.0

log = logging.getLogger(__name__)


class SdkMissing(ImportError):
    """The `docker` library is not installed."""


class EngineUnreachable(OSError):
    """An engine gave no answer in time; what it was asked may have happened."""


class EngineRefused(Exception):
    """An engine answered with an error.

    Attributes:
        status: its HTTP status.
    """

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def require_sdk() -> None:
    """Make sure that the `docker` library can be imported.

    Raises:
        SdkMissing: it cannot; an empty folder of that name does not count.
    """
    fix = "pip install 'tiderl[docker]'"
    try:
        metadata.version("docker")
    except metadata.PackageNotFoundError:
        raise SdkMissing(f"the docker runtime needs the library docker: {fix}") from None
    import docker

    if not hasattr(docker, "APIClient"):
        raise SdkMissing(f"the folders {list(docker.__path__)} stand before the library docker: {fix}, or move them")


async def in_thread(function: Callable[[], Any], limit_s: float) -> Any:
    """Run a blocking function in a thread of its own; a process that ends does not wait for it.

    Cancellation first waits (a while) for the thread, so that whoever cleans up comes after it.

    Raises:
        TimeoutError: it takes longer; the thread goes on.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result, problem = None, None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            problem = error
        try:
            loop.call_soon_threadsafe(finish, result, problem)
        except RuntimeError:
            log.debug("an engine's answer came after the event loop's end")
        finally:
            problem = None  # or the error and this frame keep each other alive

    threading.Thread(target=run, name="tide-docker-call", daemon=True).start()
    try:
        done, _ = await asyncio.wait({future}, timeout=limit_s)
    except asyncio.CancelledError:
        await asyncio.wait({future}, timeout=min(limit_s, _CANCEL_WAIT_S))
        if future.done() and not future.cancelled():
            future.exception()  # read, or the loop complains
        raise
    if not done:
        future.cancel()
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return future.result()


def open_client(url: str, environ: Mapping[str, str], timeout_s: float, max_calls: int) -> Any:
    """The library's client of one engine. Blocks; for a thread.

    Args:
        url: the engine.
        environ: for DOCKER_TLS_VERIFY and DOCKER_CERT_PATH, as the docker command reads them.
        timeout_s: deadline of connecting and of each silence of the engine.
        max_calls: connections that are kept.
    """
    import docker
    from docker.tls import TLSConfig

    tls: Any = False
    if not url.startswith("unix:") and environ.get("DOCKER_TLS_VERIFY"):
        folder = Path(environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
        pair = (str(folder / "cert.pem"), str(folder / "key.pem"))
        tls = TLSConfig(client_cert=pair, ca_cert=str(folder / "ca.pem"), verify=True)
    return docker.APIClient(base_url=url, version="auto", timeout=int(timeout_s), tls=tls, max_pool_size=max_calls)


def translated(function: Callable[[Any], Any], connect: Callable[[], Any]) -> Any:
    """Call a function of a client, with the library's errors as ours. Blocks; for a thread.

    Raises:
        EngineRefused, EngineUnreachable: see there.
    """
    import requests
    from docker.errors import APIError, DockerException

    problem: Exception
    try:
        return function(connect())
    except APIError as error:
        status = error.response.status_code if error.response is not None else 500
        problem = EngineRefused(status, str(error.explanation or error))
    except (DockerException, requests.RequestException, OSError) as error:
        problem = EngineUnreachable(str(error)[:500])
    try:
        # Not from within: the library's errors hold their connections open for as long as somebody knows them.
        raise problem
    finally:
        del problem
