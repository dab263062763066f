"""Keeps web pages of others out: a browser on this machine reaches loopback addresses, for whatever page it shows.

There is no CORS. A call that a page of another origin makes carries `Origin`; a page whose name was pointed at this
machine (DNS rebinding) carries its own name in `Host`, which counts only while no key protects the gateway.
"""

from __future__ import annotations

import ipaddress
from typing import cast

from tide_sdk.asgi import Headers, Scope
from tide_sdk.errors import TideError


def refuse_strange_pages(scope: Scope, *, anonymous: bool) -> None:
    """Refuse what only a browser on a strange page would send.

    Args:
        scope: of an HTTP request.
        anonymous: whether callers without a key are served now.

    Raises:
        TideError: 403.
    """
    host = origin = None
    for name, value in cast("Headers", scope["headers"]):
        if name == b"host":
            host = value
        elif name == b"origin":
            origin = value
    if origin is not None and origin.partition(b"://")[2].lower() != (host or b"").strip().lower():
        raise TideError(
            "forbidden", "Origin: pages of another origin may not call; behind a proxy, let it pass Host on"
        )
    if anonymous and host is not None and not _is_local(host):
        words = "Host: without keys only localhost and loopback addresses are served; make a key to use another name"
        raise TideError("forbidden", words)


def _is_local(host: bytes) -> bool:
    name = host.strip().decode("latin-1").lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
