"""The sliding window over the images of a conversation: pure.

Source: TideRL appendix C.2. Symbols: at ten images the five newest stay, so a request holds five to nine.

A request whose older images are gone does not begin with the one before: under a trainer it begins a new training
sequence. Between two prunings requests only grow, so that this happens once in `max_images - keep` images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tide_sdk.images import url_of


@dataclass(frozen=True, slots=True)
class ImageWindow:
    """When a conversation has `max_images` images, only the newest `keep` of them stay in what the model gets.

    Attributes:
        max_images: the number that is never reached: a request holds `max_images - 1` images at most.
        keep: how many stay then, from 1 to `max_images - 1`.
        note: the words in place of an image that is gone; "" for none.

    Raises:
        ValueError: the two numbers do not fit.
    """

    max_images: int = 10
    keep: int = 5
    note: str = "[older image removed]"

    def __post_init__(self) -> None:
        if not 1 <= self.keep < self.max_images:
            raise ValueError(f"ImageWindow: keep={self.keep} must be from 1 to max_images - 1 = {self.max_images - 1}")

    def num_kept(self, num_images: int) -> int:
        """How many of the newest stay of so many that came one after the other."""
        if num_images < self.max_images:
            return num_images
        return self.keep + (num_images - self.max_images) % (self.max_images - self.keep)

    def prune(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as the model gets it; the messages themselves are left as they are.

        It depends on nothing but the messages: give it the whole conversation each time. Pruned again, it stays.
        """
        num_images = sum([_num_images(message) for message in messages if not isinstance(message.get("content"), str)])
        num_gone = num_images - self.num_kept(num_images)
        if not num_gone:
            return list(messages)
        pruned: list[dict[str, Any]] = []
        for message in messages:
            num_here = min(num_gone, _num_images(message))
            num_gone -= num_here
            pruned.append(self._without(message, num_here) if num_here else message)
        return pruned

    def _without(self, message: dict[str, Any], num_images: int) -> dict[str, Any]:
        """The message without its first images."""
        parts: list[Any] = []
        for part in cast("list[Any]", message["content"]):
            if num_images and url_of(part) is not None:
                num_images -= 1
                if self.note:
                    parts.append({"type": "text", "text": self.note})
            else:
                parts.append(part)
        # A message without a part is one that templates and servers stumble over.
        return message | {"content": parts or ""}


def _num_images(message: dict[str, Any]) -> int:
    content = message.get("content")
    return sum(url_of(part) is not None for part in cast("list[Any]", content)) if isinstance(content, list) else 0
