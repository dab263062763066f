"""Images of observations: stored once by their hash, answered as references, or put back where a caller wants them.

    environment's answer -> taken_out -> [commit: answer with references, images] -> answer with references
                                                                                          | or
    GET /blobs/{digest} <- read             put_back -> answer with the images in it <----+

Of an answer without images nothing is read: whoever has one looks for the marks of `tide_sdk.images` first.
"""

from __future__ import annotations

import asyncio
import logging

from tide_gateway.repository import ImageRows
from tide_gateway.rows import StoredImage
from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.images import (
    ImageRef,
    data_url,
    digest_of,
    image_urls,
    media_type_of,
    read_data_url,
    read_reference,
    with_urls,
)

log = logging.getLogger(__name__)


def taken_out(answer: bytes) -> tuple[bytes, tuple[StoredImage, ...]]:
    """An answer with `messages`, references in place of its images; and the images. CPU work: for a thread.

    An image whose URL is not of the plain form (`read_data_url`) stays where it is, as every other URL does.
    """
    images: dict[str, StoredImage] = {}

    def referred(url: str) -> str:
        data = read_data_url(url)
        media_type = None if data is None else media_type_of(data)
        if data is None or media_type is None:
            return url
        digest = digest_of(data)
        images.setdefault(digest, StoredImage(digest, data))
        return ImageRef(digest, media_type).url

    body = codec.loads(answer)
    messages = with_urls(body["messages"], referred)
    return (codec.dumps(body | {"messages": messages}), tuple(images.values())) if images else (answer, ())


async def put_back(rows: ImageRows, owner: str | None, answer: bytes) -> bytes:
    """An answer with its images in place of their references.

    A reference that the gateway did not make, or whose image none of the owner's tasks shows, stays as it is: an
    environment must not read what belongs to others by naming it.

    Args:
        rows: the images.
        owner: whose tasks; None for everyone's.
        answer: a JSON object with or without `messages`.

    Raises:
        StorageFailed: the images could not be looked up.
        TideError: an image's file is lost.
    """
    body = codec.loads(answer)
    references = {url: ref for url in image_urls(body.get("messages", ())) if (ref := read_reference(url)) is not None}
    if not references:
        return answer
    known = await rows.known(owner, {ref.digest for ref in references.values()})
    inline: dict[str, str] = {}
    for url, ref in references.items():
        if ref.digest in known:
            inline[url] = await asyncio.to_thread(data_url, await _bytes_of(rows, ref.digest), ref.media_type)
    messages = with_urls(body["messages"], lambda url: inline.get(url, url))
    return await asyncio.to_thread(codec.dumps, body | {"messages": messages})


async def read(rows: ImageRows, owner: str | None, digest: str) -> bytes:
    """The bytes of an image that some task of the owner shows; owner None reads everyone's.

    Raises:
        TideError: there is none, or its file is lost.
        StorageFailed: it could not be looked up.
    """
    if not await rows.known(owner, [digest]):
        raise TideError("not_found", "digest: no task of yours shows such an image, or none does any more")
    return await _bytes_of(rows, digest)


async def _bytes_of(rows: ImageRows, digest: str) -> bytes:
    try:
        return await rows.bytes_of(digest)
    except FileNotFoundError as error:
        log.error("the file of image %s is missing from the blobs folder", digest)
        raise TideError("internal", f"image {digest}: its file is missing from the gateway's storage") from error
