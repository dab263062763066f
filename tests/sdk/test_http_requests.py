"""What the lean client refuses to send."""

from __future__ import annotations

import pytest

from tide_sdk.http import LeanClient


@pytest.mark.parametrize(
    "url", ["https://a", "ftp://a", "unix:relative", "http://", "http://u@h", "http://a?b=1", "nonsense"]
)
def test_a_wrong_url_is_refused(url):
    with pytest.raises(ValueError, match=r"expected|absolute"):
        LeanClient(url)


@pytest.mark.parametrize(
    "call",
    [
        {"method": "GET", "path": "no-slash"},
        {"method": "GET", "path": "/a b"},
        {"method": "GET", "path": "/a\r\nX: y"},
        {"method": "TRACE", "path": "/"},
        {"method": "GET", "path": "/", "headers": {"X": "a\r\nY: b"}},
        {"method": "GET", "path": "/", "headers": {"X Y": "a"}},
    ],
)
async def test_a_request_cannot_smuggle_another(call):
    async with LeanClient("http://127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=r"cannot be sent|can be sent"):
            await client.request(**call)
