"""A conversation through a capture, beside the books of an engine that samples what it is told."""

from __future__ import annotations

import re

from tide_trainer import types
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.replies import Reply, read_reply
from tide_trainer.router.sessions import Capture


class Play:
    """A conversation through a capture, with the engine's books beside it."""

    def __init__(self, renderer) -> None:
        self.renderer = renderer
        self.capture = Capture(renderer)
        self.replies: list[Reply] = []
        self.added: list[tuple[str, list[int]]] = []
        self.books: list[tuple[list[int], tuple[int, ...], tuple[float, ...], int]] = []

    def turn(self, messages, ids, version=0, reason="stop", stop=()) -> str:
        """The text of one reply."""
        return self.reply(messages, ids, version, reason, stop).text

    def reply(self, messages, ids, version=0, reason="stop", stop=(), tools=None) -> Reply:
        """One reply, as the engine that samples `ids` gives it."""
        planned = self.capture.plan(messages, tools)
        if planned.segment is None:
            assert planned.prompt_ids == self.renderer.encode(planned.text)
        else:
            self.added.append((planned.text, planned.prompt_ids[len(planned.segment.ids) :]))
        logprobs = tuple(-0.01 * (i + 1) - version for i in range(len(ids)))
        reply = read_reply(self.renderer, planned.expected, types.Completion(tuple(ids), logprobs, 0, reason), stop)
        self.capture.commit(planned, reply, version)
        self.books.append((list(planned.prompt_ids), reply.token_ids, reply.logprobs, version))
        self.replies.append(reply)
        return reply


def check_books(play: Play) -> None:
    """Every turn's prompt and sample stand in some segment, in place; nothing else is marked as sampled."""
    segments = play.capture.segments()
    marked = [set() for _ in segments]
    for prompt, sampled, logprobs, version in play.books:
        places = [
            number
            for number, segment in enumerate(segments)
            if list(segment.token_ids[: len(prompt)]) == prompt
            and segment.token_ids[len(prompt) : len(prompt) + len(sampled)] == sampled
            and segment.logprobs[len(prompt) : len(prompt) + len(sampled)] == logprobs
            and set(segment.versions[len(prompt) : len(prompt) + len(sampled)]) == {version}
            and all(segment.sampled[len(prompt) : len(prompt) + len(sampled)])
        ]
        assert places, "a turn is in no segment"
        for number in places:
            marked[number] |= set(range(len(prompt), len(prompt) + len(sampled)))
    for segment, places in zip(segments, marked, strict=True):
        assert {i for i, sampled in enumerate(segment.sampled) if sampled} == places
        assert all(
            v == -1 and p == 0.0
            for v, p, s in zip(segment.versions, segment.logprobs, segment.sampled, strict=True)
            if not s
        )


def spelled(renderer: Renderer, text: str, *, markers: bool = True) -> list[int]:
    """Ids of a text letter by letter, as encoding would not give them; with `markers` added tokens are one id each."""
    if not markers:
        return [i for letter in text for i in renderer.encode_after(letter)]
    added = sorted({t.content for t in renderer._tokenizer.get_added_tokens_decoder().values()}, key=len, reverse=True)
    pieces = re.findall("|".join([*map(re.escape, added), "(?s:.)"]), text)
    return [i for piece in pieces for i in renderer.encode_after(piece)]
