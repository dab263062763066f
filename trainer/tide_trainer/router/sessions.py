"""Token-exact capture: what the engine saw and sampled in each session, in training segments.

The next prompt is the ids so far plus the ids of what the template adds; sampled ids are never rendered again. Whether
that is allowed is seen from the text: the newly rendered conversation must begin with the text of a segment so far
(prompt, then the reply as it was answered or as its ids read in place, then the stop token). If it does not, because
the template drops or trims history or because the agent edited it, a new segment starts with the freshly rendered
prompt: an explicit break.

Several segments stay open, so that an agent that alternates between two conversations extends both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tide_trainer import types
from tide_trainer.router.renderer import Renderer, RenderError

MAX_OPEN = 8
"""Segments of a session that may still be extended."""


@dataclass(eq=False, slots=True)
class OpenSegment:
    """A segment that grows.

    Attributes:
        texts: the text that `ids` stand for: as the reply was answered, and where it differs as the ids read in place.
        ids: prompt and sampled ids in order.
        turns: (start of the sampled ids, their log-probs, model version) of each turn.
    """

    texts: tuple[str, ...] = ()
    ids: list[int] = field(default_factory=list)
    turns: list[tuple[int, tuple[float, ...], int]] = field(default_factory=list)

    def freeze(self) -> types.Segment:
        """The segment as the trainer takes it."""
        length = len(self.ids)
        sampled, logprobs, versions = [False] * length, [0.0] * length, [-1] * length
        for start, values, version in self.turns:
            end = start + len(values)
            sampled[start:end] = [True] * len(values)
            logprobs[start:end] = values
            versions[start:end] = [version] * len(values)
        return types.Segment(tuple(self.ids), tuple(sampled), tuple(logprobs), tuple(versions))


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A prompt, ready to be sent; nothing is captured before `Capture.commit`.

    Attributes:
        segment: the segment that it extends, None for a break.
        text: the rendered conversation.
        prompt_ids: [T] exactly what the engine gets.
        raw: no template adds the end token or a stop string again; only the ids as they read in place are continued.
    """

    segment: OpenSegment | None
    text: str
    prompt_ids: list[int]
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What was sampled in a turn, cut at a stop string where one was given.

    Attributes:
        token_ids: [N] sampled ids that count, the stop id included.
        logprobs: [N] log-probs of them.
        content: their text, without special tokens and without the stop string.
        finish_reason: stop or length.
        message: the assistant message that the agent gets for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    content: str
    finish_reason: str
    message: Mapping[str, Any] = field(default_factory=dict)


class Capture:
    """The segments of one session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._segments: list[OpenSegment] = []
        self.num_tokens = 0
        self.num_breaks = 0

    def plan(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> PlannedTurn:
        """The prompt of the next turn. Raises RenderError if the template refuses the messages."""
        text = self._renderer.render(messages, tools)
        return self._plan(text, raw=False)

    def plan_text(self, text: str) -> PlannedTurn:
        """The prompt of the next turn as raw text, which no template touches."""
        return self._plan(text, raw=True)

    def plan_ids(self, ids: Sequence[int]) -> PlannedTurn:
        """The prompt of the next turn as token ids. Raises RenderError for an id that the tokenizer does not know."""
        best, length = None, 0
        for segment in self._segments[-MAX_OPEN:]:
            known = len(segment.ids)
            if length < known < len(ids) and segment.ids == list(ids[:known]):
                best, length = segment, known
        for place, token_id in enumerate(ids[length:], length):
            if not self._renderer.knows(token_id):
                raise RenderError(f"prompt[{place}]: the tokenizer has no token {token_id}")
        return PlannedTurn(best, self._renderer.decode_after(ids), list(ids), raw=True)

    def _plan(self, text: str, *, raw: bool) -> PlannedTurn:
        best, length = None, 0
        for segment in self._segments[-MAX_OPEN:]:
            for known in segment.texts:
                if length < len(known) < len(text) and text.startswith(known):
                    best, length = segment, len(known)
        if best is None:
            return PlannedTurn(None, text, self._renderer.encode(text), raw)
        added = self._renderer.encode_after(text[length:])
        return PlannedTurn(best, text, best.ids + added, raw)

    def commit(self, turn: PlannedTurn, reply: Reply, version: int) -> None:
        """Capture an answered turn; a segment that was extended by another call in between is left, as a break."""
        segment = turn.segment
        before = len(segment.ids) if segment is not None else 0
        if segment is None or turn.prompt_ids[:before] != segment.ids:
            self.num_breaks += bool(self._segments)
            segment, before = OpenSegment(), 0
        else:
            self._segments.remove(segment)
        # The latest is last: the oldest is the one that can no longer be extended.
        self._segments.append(segment)
        last = reply.token_ids[-1] if reply.token_ids else None
        stop_text = (
            self._renderer.token_text(last) if last in self._renderer.stop_token_ids and last is not None else ""
        )
        answered, in_place = reply.content + stop_text, self._renderer.decode_after(reply.token_ids)
        said = (in_place,) if turn.raw else (answered, in_place)
        segment.texts = tuple(turn.text + text for text in dict.fromkeys(said))
        segment.ids.extend(turn.prompt_ids[before:])
        segment.turns.append((len(segment.ids), reply.logprobs, version))
        segment.ids.extend(reply.token_ids)
        self.num_tokens += len(turn.prompt_ids) - before + len(reply.token_ids)

    def segments(self) -> list[types.Segment]:
        """All segments, in the order in which they were last extended."""
        return [segment.freeze() for segment in self._segments]


def read_reply(renderer: Renderer, completion: types.Completion, stop: Sequence[str]) -> Reply:
    """The reply of a completion, cut after the token at which the first of `stop` is complete.

    Raises:
        ValueError: the engine's ids and log-probs do not match.
    """
    ids, logprobs = completion.token_ids, completion.logprobs
    if len(ids) != len(logprobs) or not ids:
        raise ValueError(f"the engine sampled {len(ids)} ids with {len(logprobs)} log-probs")
    content = renderer.decode(ids)
    reason = "length" if completion.finish_reason == "length" else "stop"
    if stop and any(word in content for word in stop):
        low, high = 1, len(ids)  # the shortest beginning that holds a stop string
        while low < high:
            middle = (low + high) // 2
            text = renderer.decode(ids[:middle])
            low, high = (low, middle) if any(word in text for word in stop) else (middle + 1, high)
        ids, logprobs, reason = ids[:low], logprobs[:low], "stop"
        content = renderer.decode(ids)
        content = content[: min(at for word in stop if (at := content.find(word)) >= 0)]
    return Reply(ids, logprobs, content, reason, {"role": "assistant", "content": content})


def segment_data(segment: types.Segment) -> dict[str, Any]:
    """A segment as it crosses the channel."""
    return {
        "token_ids": segment.token_ids,
        "sampled": segment.sampled,
        "logprobs": segment.logprobs,
        "versions": segment.versions,
    }


def read_segment(data: Mapping[str, Any]) -> types.Segment:
    """The inverse of `segment_data`. Raises ValueError if the four lists differ in length."""
    lists = [tuple(data[name]) for name in ("token_ids", "sampled", "logprobs", "versions")]
    if len({len(values) for values in lists}) != 1:
        raise ValueError("the lists of a segment differ in length")
    return types.Segment(*lists)
