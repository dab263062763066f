"""Which addresses the gateway may call: resolve, check every address, connect to the very one that was checked.

    name -> addresses -> any refused? -> connect to the address; certificate checked against the name

Nothing is resolved a second time, so a name that changes its mind between check and connection gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

from tide_gateway.specs import RemoteUrl
from tide_sdk.http_connection import ConnectFailed, Connection

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Numeric addresses of a host name; raises OSError where there is none."""

MAX_ADDRESSES = 8
CONNECT_S = 5.0
"""Seconds for one address; the next is tried afterwards."""

_NEVER = tuple(map(ipaddress.ip_network, ("0.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4", "::/128", "ff00::/8")))
# Python's is_global lets some of these through, and differs between its versions.
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            *("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
            *("192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            # Mapped, translated and tunnelled IPv4 (its private addresses would come in this way), then local IPv6.
            *("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/23", "2002::/16", "2001:db8::/32"),
            *("fc00::/7", "fe80::/10", "fec0::/10"),
        ),
    )
)


class Refused(ConnectFailed):
    """The server is not to be talked to, for its address or its certificate; trying again does not help."""


async def resolve(host: str, port: int) -> list[str]:
    """Numeric addresses by the system's resolver, which also reads `127.1`, `0x7f.1` and `2130706433`.

    Raises:
        OSError: no such name.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def refusal(address: str, *, allow_private: bool) -> str | None:
    """Why a numeric address must not be called, None if it may be.

    Args:
        address: IPv4 or IPv6, with or without a zone.
        allow_private: only multicast, unspecified and reserved addresses are refused then.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return "is no numeric address"
    bare = ipaddress.ip_address(parsed.packed)  # without the zone
    inner = bare.ipv4_mapped if isinstance(bare, ipaddress.IPv6Address) else None
    if any(found in network for network in _NEVER for found in (bare, inner) if found is not None):
        return "is no address of a server (multicast, unspecified or reserved)"
    if allow_private:
        return None
    if not bare.is_global or any(bare in network for network in _NOT_PUBLIC):
        return "is private, loopback, link-local or otherwise not public; allow_private = true permits that"
    return None


async def dial(url: RemoteUrl, lookup: Resolve, *, allow_private: bool, tls: ssl.SSLContext | None) -> Connection:
    """Open one connection to an address that was checked just now. The caller bounds the time.

    Args:
        url: where to; its name is what the certificate is checked against.
        lookup: the resolver.
        allow_private: see `refusal`.
        tls: None for plain http.

    Raises:
        Refused: an address or the certificate is refused.
        OSError: no such name, or nothing listens.
    """
    name = url.host.rstrip(".")
    addresses = list(await lookup(url.host, url.port))[:MAX_ADDRESSES]
    if not addresses:
        raise OSError(f"{name} has no address")
    for address in addresses:
        # One bad address refuses the name: an honest server has no private address beside a public one.
        if (why := refusal(address, allow_private=allow_private)) is not None:
            raise Refused(f"{name} is refused: its address {address} {why}")
    loop = asyncio.get_running_loop()
    last: OSError | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_S):
                options = {"ssl": tls, "server_hostname": name} if tls is not None else {}
                _, connection = await loop.create_connection(Connection, address, url.port, **options)
                return connection
        except ssl.SSLCertVerificationError as error:
            raise Refused(f"the certificate of {name} is refused: {error.verify_message}") from error
        except (TimeoutError, OSError) as error:
            last = error if str(error) else TimeoutError(f"{address} did not answer within {CONNECT_S:g} s")
    assert last is not None
    raise last
