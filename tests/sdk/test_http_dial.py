"""Connections that somebody else makes for the lean client."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk.http import ConnectFailed, LeanClient
from tide_sdk.http_connection import Connection

ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


async def test_a_dialer_makes_every_connection(socket_server, read_request):
    hosts, dialled = [], 0

    async def handler(reader, writer):
        head, _ = await read_request(reader)
        hosts.append([line for line in head.split(b"\r\n") if line.startswith(b"Host:")])
        writer.write(ANSWER)
        writer.close()

    async with socket_server(handler) as url:
        host, port = url.removeprefix("http://").split(":")

        async def dial() -> Connection:
            nonlocal dialled
            dialled += 1
            if dialled == 3:
                raise ConnectionRefusedError("not today")
            return (await asyncio.get_running_loop().create_connection(Connection, host, int(port)))[1]

        async with LeanClient("https://elsewhere.test/p", dial=dial) as client:
            await client.request("GET", "/")
            await client.request("GET", "/")
            with pytest.raises(ConnectFailed, match=r"https://elsewhere\.test/p: not today"):
                await client.request("GET", "/")
    assert (dialled, hosts) == (3, [[b"Host: elsewhere.test:443"]] * 2)
