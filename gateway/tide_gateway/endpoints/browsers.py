"""Keeps web pages of others out: a browser on this machine reaches loopback addresses, for whatever page it shows.

There is no CORS. A call that a page of another origin makes carries `Origin`; a page whose name was pointed at this
machine (DNS rebinding) carries its own name in `Host`, which counts only while no key protects the gateway.
"""

from __future__ import annotations

import re
from typing import cast

from tide_gateway.auth import Owners
from tide_sdk.asgi import Headers, Scope
from tide_sdk.errors import TideError

_LOCAL = re.compile(rb"\s*(?:127(?:\.\d{1,3}){3}|\[::1\]|(?:[a-z0-9-]+\.)*localhost)\.?(?::\d{1,5})?\s*", re.IGNORECASE)


async def refuse_strange_pages(scope: Scope, owners: Owners) -> None:
    """Refuse what only a browser on a strange page would send.

    Args:
        scope: of an HTTP request.
        owners: say whether callers without a key are served now.

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
    if host is not None and not _LOCAL.fullmatch(host) and await owners.anonymous():
        words = "Host: without keys only localhost and loopback addresses are served; make a key to use another name"
        raise TideError("forbidden", words)
