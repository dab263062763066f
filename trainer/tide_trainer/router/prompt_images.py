"""The images of one session's prompts: which there are, how a conversation's text tells them apart, and their ids.

    template's text  ...<|image_pad|>...   one for each image
    keyed            ...<|image_pad|>DIGEST...   so that the same words around another image are another text
    ids              each placeholder id repeated as often as the model's image processor makes patches of the image

A model without images has none of this: texts and ids pass through as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tide_sdk.images import read_reference, url_of
from tide_trainer.images import ImageTokens
from tide_trainer.router.renderer import RenderError
from tide_trainer.types import ImageSpan

MAX_IMAGES = 4096
"""Images that one session may have; of each only the digest and the number of its tokens are kept here."""


class PromptImages:
    """The images of one session.

    Args:
        tokens: how the model writes images; None for a model without images.

    Attributes:
        known: digest -> placeholder ids of each image that messages may refer to.
    """

    def __init__(self, tokens: ImageTokens | None) -> None:
        self.tokens = tokens
        self.known: dict[str, int] = {}
        self._key = re.compile(re.escape(tokens.placeholder_text) + "([0-9a-f]{64})") if tokens else None

    def keyed(self, text: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """A rendered conversation with the digest of its image behind each placeholder.

        Raises:
            RenderError: the text does not have exactly the images of the messages; the words say why that may be.
        """
        if self.tokens is None:
            return text
        placeholder = self.tokens.placeholder_text
        if any(placeholder in words for words in _words(messages)):
            raise RenderError(f"a text holds {placeholder!r}, which stands for an image; leave it out")
        digests = list(_digests(messages))
        pieces = text.split(placeholder)
        if len(pieces) != len(digests) + 1:
            words = f"the chat template writes {len(pieces) - 1} of the {len(digests)} images of these messages"
            raise RenderError(f"{words}; leave out the messages or images that it drops")
        return pieces[0] + "".join(
            placeholder + digest + piece for digest, piece in zip(digests, pieces[1:], strict=True)
        )

    def unkeyed(self, text: str) -> tuple[str, list[str]]:
        """A piece of keyed text as the template wrote it, and the digests of its images."""
        if self._key is None or self.tokens is None:
            return text, []
        digests: list[str] = self._key.findall(text)
        return (self._key.sub(self.tokens.placeholder_text, text), digests) if digests else (text, [])

    def expanded(self, ids: list[int], digests: Sequence[str], start: int) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Ids with each placeholder id repeated for its image, and where the images stand.

        Args:
            ids: of a piece of text, one placeholder id for each image.
            digests: the images, in order.
            start: where the piece begins in the prompt.

        Raises:
            RenderError: the tokenizer made another number of placeholder ids of the text, or an image is not known.
        """
        if self.tokens is None:
            return ids, ()
        placeholder = self.tokens.placeholder_id
        if ids.count(placeholder) != len(digests):
            words = f"{ids.count(placeholder)} image placeholders for {len(digests)} images"
            raise RenderError(f"{words}: a text must not hold {self.tokens.placeholder_text!r}")
        if not digests:
            return ids, ()
        whole: list[int] = []
        spans: list[ImageSpan] = []
        left = iter(digests)
        for token_id in ids:
            if token_id != placeholder:
                whole.append(token_id)
                continue
            digest = next(left)
            num_tokens = self.known.get(digest)
            if num_tokens is None:
                raise RenderError(f"image {digest[:12]} was not given to this session")
            spans.append(ImageSpan(start + len(whole), num_tokens, digest))
            whole.extend([placeholder] * num_tokens)
        return whole, tuple(spans)

    def check_sampled(self, ids: Sequence[int]) -> None:
        """Raises ValueError where an engine sampled what stands for an image: later prompts would be misread."""
        if self.tokens is not None and not set(self.tokens.forbidden_ids).isdisjoint(ids):
            raise ValueError("the engine sampled an image placeholder, which it must never do")


def _digests(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for part in _parts(messages):
        ref = read_reference(url_of(part) or "")
        if ref is not None:
            yield ref.digest


def _words(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from (content for message in messages if isinstance(content := message.get("content"), str))
    yield from (text for part in _parts(messages) if isinstance(text := part.get("text"), str))


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from content
