"""The images that sessions give to the router: checked, counted, and kept in the run's store under their digest.

    PUT /sessions/{session}/v1/images/{digest} --+--> is it that image? a whole one? how many tokens? -> store -> known
    a data URL in a message ---------------------+                                          to the session by its digest

The store is the run's folder that engines and training ranks read. Decoding runs in threads, a few at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tide_sdk.images import (
    MAX_IMAGE_BYTES,
    ImageRef,
    digest_of,
    image_urls,
    media_type_of,
    read_data_url,
    read_reference,
    with_urls,
)
from tide_trainer.errors import ImageFailed, ImageRefused
from tide_trainer.images import ImageStore, ImageTokens, image_size
from tide_trainer.router.openai_wire import ApiError, ChatRequest
from tide_trainer.router.prompt_images import MAX_IMAGES, PromptImages

MAX_AT_ONCE = 32
"""Images in memory at once, each of `MAX_IMAGE_BYTES` at most; further ones wait in order."""
MAX_DECODED = 4
"""Those of them that are looked into at once: a small file may be a large picture."""
MAX_REMEMBERED = 65_536
WAIT_LIMIT_S = 60.0


class RunImages:
    """Takes images.

    Args:
        tokens: how the model writes images; None for a model without images.
        store: the run's; None where it has none.
    """

    def __init__(self, tokens: ImageTokens | None, store: ImageStore | None) -> None:
        self._tokens = tokens
        self._store = store
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._decoders = asyncio.Semaphore(MAX_DECODED)

    async def put(self, images: PromptImages, digest: str, read: Callable[[], Awaitable[bytes]]) -> int:
        """Take an image of a session under its digest; the number of its tokens. Safe to repeat.

        Args:
            images: the session's.
            digest: SHA-256 (hex) of its bytes.
            read: gives the bytes, at most `MAX_IMAGE_BYTES`; called once there is room for them.

        Raises:
            ApiError: it is no such image, or the session, model or store takes none.
        """
        tokens, store = self._taking()
        if digest not in images.known and len(images.known) >= MAX_IMAGES:
            raise ApiError(400, "too_many_images", f"a session has at most {MAX_IMAGES} images")
        await self._place()
        try:
            data = await read()
            try:
                async with self._decoders:  # each is bounded by the pixels that a decoder takes
                    num_tokens = await asyncio.to_thread(self._kept, tokens, store, digest, data)
            except ImageRefused as error:
                raise ApiError(400, "invalid_image", str(error), param="image") from error
            except ImageFailed as error:
                raise ApiError(503, "image_store_failed", str(error), kind="server_error") from error
        finally:
            self._places.release()
        self._counts[digest] = images.known[digest] = num_tokens
        if len(self._counts) > MAX_REMEMBERED:
            self._counts.popitem(last=False)
        return num_tokens

    async def referred(self, images: PromptImages, request: ChatRequest) -> ChatRequest:
        """The request with a reference for each of its images, all of them known to the session.

        Raises:
            ApiError: 400, naming the image that cannot be taken.
        """
        urls = list(dict.fromkeys(image_urls(request.messages)))
        if not urls:
            return request
        self._taking()
        references: dict[str, str] = {}
        for url in urls:
            ref = read_reference(url)
            if ref is None:
                ref, data = _inline(url)
                if ref.digest not in images.known:
                    await self.put(images, ref.digest, lambda data=data: _at_hand(data))
            elif ref.digest not in images.known:
                words = f"image {ref.digest} was not given to this session: PUT it to images/{ref.digest} first"
                raise ApiError(400, "image_unknown", words, param="messages")
            references[url] = ref.url
        return replace(request, messages=with_urls(request.messages, references.__getitem__))

    def _taking(self) -> tuple[ImageTokens, ImageStore]:
        if self._tokens is None:
            words = "this model takes no images; leave the image parts out, or train a model that takes them"
            raise ApiError(400, "images_unsupported", words, param="messages")
        if self._store is None:
            raise ApiError(400, "images_unsupported", "this router has no image folder; start it with --image-folder")
        return self._tokens, self._store

    async def _place(self) -> None:
        try:
            async with asyncio.timeout(WAIT_LIMIT_S):
                await self._places.acquire()
        except TimeoutError as error:
            words = "many images are being taken; send it again"
            raise ApiError(429, "rate_limit_exceeded", words, kind="rate_limit_error") from error

    def _kept(self, tokens: ImageTokens, store: ImageStore, digest: str, data: bytes) -> int:
        if digest_of(data) != digest:
            raise ImageRefused(f"these {len(data)} bytes are not image {digest}: its name is their SHA-256")
        if len(data) > MAX_IMAGE_BYTES or media_type_of(data) is None:
            raise ImageRefused(f"give a PNG, JPEG, WebP or GIF file of at most {MAX_IMAGE_BYTES} bytes")
        known = self._counts.get(digest)
        num_tokens = tokens.count(*image_size(data)) if known is None else known
        store.put(data)
        return num_tokens


def _inline(url: str) -> tuple[ImageRef, bytes]:
    data = read_data_url(url)
    media_type = None if data is None else media_type_of(data)
    if data is None or media_type is None:
        words = "a data URL must be data:image/TYPE;base64,... with the bytes of that TYPE: png, jpeg, webp or gif"
        raise ApiError(400, "invalid_image", words, param="messages")
    return ImageRef(digest_of(data), media_type), data


async def _at_hand(data: bytes) -> bytes:
    return data
