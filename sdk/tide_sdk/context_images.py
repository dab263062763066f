"""The images of one task at its agent: references in the messages, the bytes where they are wanted.

gateway -- references --> messages      an environment server alone: data URLs -> references, bytes kept here
bytes: kept here | client's cache | GET /blobs at the gateway
model's server takes references (the router): each image is put there once, as soon as a message shows it
               does not: they become data URLs in what is sent
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from tide_sdk.client import GatewayClient
from tide_sdk.image_window import ImageWindow
from tide_sdk.images import (
    ImageRef,
    ImageUnknown,
    data_url,
    digest_of,
    image_urls,
    media_type_of,
    read_data_url,
    read_reference,
    url_of,
    with_urls,
)
from tide_sdk.model import ModelEndpoint
from tide_sdk.model_errors import RequestInvalid


class ContextImages:
    """One task's images.

    Args:
        gateway: has the images of observations.
        model: gets them.

    Attributes:
        window: prunes the images of what the model gets; an agent sets another, or None for all images.
    """

    def __init__(self, gateway: GatewayClient, model: ModelEndpoint) -> None:
        self._gateway = gateway
        self._model = model
        self._own: dict[str, bytes] = {}
        self._put: set[str] = set()
        self._refused = False
        self.window: ImageWindow | None = ImageWindow()

    def take(self, messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """An observation's messages with references in place of data URLs, whose bytes are kept: nobody else has them.

        Under a gateway that answers references there are none.
        """

        def referred(url: str) -> str:
            data = read_data_url(url)
            media_type = None if data is None else media_type_of(data)
            if data is None or media_type is None:
                return url
            digest = digest_of(data)
            self._own[digest] = data
            return ImageRef(digest, media_type).url

        return with_urls(messages, referred)

    async def read(self, part: Mapping[str, Any]) -> bytes:
        """The bytes of an image part: the file as the environment made it.

        Raises:
            ValueError: the part shows no image, or one that is elsewhere.
            ImageUnknown: it is not to be had any more; of an environment server without a gateway only the images of
                the window are kept.
            TideError: the gateway refused, for example because no task of the caller shows it.
            TransportError: no answer.
        """
        url = url_of(part) or ""
        ref = read_reference(url)
        if ref is not None:
            return await self._read(ref)
        data = read_data_url(url)
        if data is None:
            raise ValueError(f"part: its image is neither a reference nor a data URL: {url[:80]!r}")
        return data

    async def offer(self, messages: Sequence[dict[str, Any]]) -> None:
        """As `share`, before it is known whether the agent shows them to the model: a server that takes no images is no
        fault yet.

        Raises:
            TideError, TransportError: as `share`.
        """
        if not self._refused:
            try:
                await self.share(messages)
            except RequestInvalid:
                self._refused = True

    async def share(self, messages: Sequence[dict[str, Any]]) -> None:
        """Put the images of the messages to the model's server, where it takes references; each one once.

        Raises:
            TideError: the gateway refused one.
            RequestInvalid: the model's server does not take one.
            TransportError: no answer.
        """
        if not self._model.image_references:
            return
        for url in image_urls(messages):
            ref = read_reference(url)
            if ref is not None and ref.digest not in self._put:
                await self._model.put_image(ref, await self._read(ref))
                self._put.add(ref.digest)

    async def sendable(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the model's server takes them, pruned by the window.

        Raises:
            ImageUnknown, TideError, TransportError: as `read`.
            RequestInvalid: as `share`.
        """
        sent = list(messages) if self.window is None else self.window.prune(messages)
        self._forget(sent)
        if self._model.image_references:
            await self.share(sent)
            return sent
        inline: dict[str, str] = {}
        for url in image_urls(sent):
            ref = read_reference(url)
            if ref is not None and url not in inline:
                inline[url] = data_url(await self._read(ref), ref.media_type)
        return with_urls(sent, lambda url: inline.get(url, url)) if inline else sent

    def _forget(self, sent: Sequence[dict[str, Any]]) -> None:
        """Keep the bytes of those only that are still shown to the model."""
        if self._own:
            shown = {ref.digest for url in image_urls(sent) if (ref := read_reference(url)) is not None}
            self._own = {digest: data for digest, data in self._own.items() if digest in shown}

    async def _read(self, ref: ImageRef) -> bytes:
        data = self._own.get(ref.digest)
        if data is not None:
            return data
        if not self._gateway.references:
            words = "is not kept any more; a gateway keeps all, for a client with references=True"
            raise ImageUnknown(f"image {ref.digest[:12]} {words}")
        return await self._gateway.blob(ref.digest)


class ImageContext:
    """What a task's context has for images.

    Attributes:
        messages: the conversation so far, with references in place of its images.
        images: reads images, and has the window that prunes them.
    """

    messages: list[dict[str, Any]]
    images: ContextImages

    async def sendable_messages(self) -> list[dict[str, Any]]:
        """The conversation as the model's server takes it, for agents with an OpenAI client of their own: images pruned
        by the window of `images`, those that stay as references at a trainer's router, else as data URLs.

        Raises:
            ImageUnknown, TideError, RequestInvalid, TransportError: an image is not to be had; let it pass.
        """
        return await self.images.sendable(self.messages)


def without_bytes(messages: Any) -> list[dict[str, Any]]:
    """What an agent has left as its conversation, with references in place of the images in it, for records: an image
    is named, not held. What is no message stays as it is; what is no list is none.
    """

    def referred(url: str) -> str:
        data = read_data_url(url)
        media_type = None if data is None else media_type_of(data)
        return url if data is None or media_type is None else ImageRef(digest_of(data), media_type).url

    found = cast("list[Any]", messages) if isinstance(messages, list) else []
    return [with_urls([cast("dict[str, Any]", one)], referred)[0] if isinstance(one, dict) else one for one in found]
