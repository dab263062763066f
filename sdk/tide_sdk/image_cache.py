"""Images by their hash: read from a server and checked, and kept in memory, the longest unused given up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tide_sdk.http import read_json
from tide_sdk.http_connection import ProtocolFailed
from tide_sdk.http_parse import Response
from tide_sdk.images import digest_of, is_digest


class ImageCache:
    """Keeps at most `max_bytes` of images; a larger one is not kept at all.

    Args:
        max_bytes: 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0

    def get(self, digest: str) -> bytes | None:
        """The bytes, which count as used now; None where they are not here."""
        data = self._images.get(digest)
        if data is not None:
            self._images.move_to_end(digest)
        return data

    def put(self, digest: str, data: bytes) -> None:
        """Keep an image of which the caller knows the hash."""
        if digest in self._images or len(data) > self._max_bytes:
            return
        self._images[digest] = data
        self.num_bytes += len(data)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._images.popitem(last=False)[1])


def blob_reader(digest: str) -> Callable[[Response], bytes]:
    """What reads the answer to `GET /blobs/{digest}`.

    The reader raises `TideError` for a refusal, and `ProtocolFailed` where the bytes have another hash: on a connection
    that mangles them the next try may be better.

    Raises:
        ValueError: that is no digest.
    """
    if not is_digest(digest):
        raise ValueError(f"digest: {digest[:80]!r} is no SHA-256 in lower-case hex")

    def read(response: Response) -> bytes:
        if response.status != 200:
            read_json(response)
            raise ProtocolFailed(f"HTTP {response.status} instead of image {digest}")
        if digest_of(response.body) != digest:
            raise ProtocolFailed(f"{len(response.body)} bytes that are not image {digest}")
        return response.body

    return read
