"""Token-exact capture: what the engine saw and sampled in each session, in training segments.

    messages -> answered ones restored -> rendered -> does the text go on from a segment? -> ids + ids of what is added
                                                                     no -> break: a new segment, freshly encoded

The next prompt is the ids so far plus the ids of what the template adds; sampled ids are never rendered again. Whether
that is allowed is seen from the text: the newly rendered conversation must begin with the prompt of a segment's last
turn, then that turn's reply (as it was answered, as its ids read in place, or with calls whose JSON alone is written
otherwise), then its stop token. What follows is added. If the template drops or trims history, or the agent edited it,
a new segment starts with the freshly rendered prompt: an explicit break.

Before rendering, a message that the agent was answered takes the form in which the template is to see it: agents lose
thinking, for which OpenAI's API has no field, and write the JSON of calls anew.

Several segments stay open, so that an agent that alternates between two conversations extends both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from tide_trainer import types
from tide_trainer.router.prompt_images import PromptImages
from tide_trainer.router.renderer import Renderer, RenderError
from tide_trainer.router.replies import Expected, Reply, is_answer, opened_thinking, same_but_for_json

MAX_OPEN = 8
"""Segments of a session that may still be extended."""
MAX_ENDS = 16
"""Places at which a reply that the template wrote in its own way may end; beyond them it is a break."""
MAX_TOKEN_CHARS = 32
"""Characters of a prompt for each token of the context; a longer prompt is refused before it is encoded."""
Answers = Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Place in the conversation -> a message as the agent was answered, and as the template is to see it."""


@dataclass(frozen=True, slots=True)
class LastTurn:
    """The text of a segment's last turn.

    Attributes:
        prompt: the rendered conversation.
        reply: the reply as it was answered, without the stop token.
        stop: the stop token's text, empty if none was sampled.
        endings: texts of reply and stop token: as it was answered, and where it differs as the ids read in place.
        has_calls: the reply holds tool calls.
    """

    prompt: str
    reply: str
    stop: str
    endings: tuple[str, ...]
    has_calls: bool

    def end_in(self, text: str) -> int:
        """How much of a rendered conversation begins with this turn as it stands, 0 if it does not."""
        if not text.startswith(self.prompt):
            return 0
        start, end = len(self.prompt), 0
        for words in self.endings:
            if text.startswith(words, start):
                end = max(end, start + len(words))
        return end

    def rewritten_end_in(self, text: str, renderer: Renderer) -> int:
        """The same where the template wrote the JSON of the reply's calls in its own way.

        The reply ends at the first text of the stop token behind which it is whole: arguments may hold that text too.
        """
        if not self.stop or not text.startswith(self.prompt):
            return 0
        opened = bool(opened_thinking(self.prompt))
        start, at = len(self.prompt), len(self.prompt)
        for _ in range(MAX_ENDS):
            if (end := text.find(self.stop, at)) < 0:
                return 0
            at = end + len(self.stop)
            if same_but_for_json(text[start:end], self.reply, renderer.format, opened=opened):
                return at
        return 0


@dataclass(eq=False, slots=True)
class OpenSegment:
    """A segment that grows.

    Attributes:
        last: the text of the last turn, None if the segment is no longer open.
        answers: the answered messages of its conversation whose form differs for agent and template.
        ids: prompt and sampled ids in order.
        images: where images stand in them.
        turns: (start of the sampled ids, their log-probs, model version) of each turn.
    """

    last: LastTurn | None = None
    answers: Answers = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    images: tuple[types.ImageSpan, ...] = ()
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
        return types.Segment(tuple(self.ids), tuple(sampled), tuple(logprobs), tuple(versions), self.images)


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A prompt, ready to be sent; nothing is captured before `Capture.commit`.

    Attributes:
        segment: the segment that it extends, None for a break.
        text: the rendered conversation, keyed by its images (`prompt_images`).
        prompt_ids: [T] exactly what the engine gets.
        expected: what is to be read in the reply.
        place: the reply's place in the conversation.
        answers: the answered messages that were found in it.
        images: where images stand in `prompt_ids`.
        raw: no template adds the end token or a stop string again; only the ids as they read in place are continued.
    """

    segment: OpenSegment | None
    text: str
    prompt_ids: list[int]
    expected: Expected
    place: int
    answers: Answers
    images: tuple[types.ImageSpan, ...] = ()
    raw: bool = False


class PromptTooLong(ValueError):
    """The prompt is so long that it is not even encoded."""


class Capture:
    """The segments of one session.

    Args:
        renderer: of the session's model.
        max_context_tokens: bounds what is encoded; None encodes all.
    """

    def __init__(self, renderer: Renderer, max_context_tokens: int | None = None) -> None:
        self._max_tokens = max_context_tokens
        self.images = PromptImages(renderer.images)
        self._renderer = renderer
        self._segments: list[OpenSegment] = []
        self._num_turns = 0
        self.num_tokens = 0
        self.num_breaks = 0

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        read_calls: bool = True,
    ) -> PlannedTurn:
        """The prompt of the next turn.

        Args:
            messages: the conversation, as OpenAI has it.
            tools: tool schemas for the template.
            read_calls: look for tool calls in the reply, if there are tools.

        Raises:
            RenderError: the template refuses the messages.
            PromptTooLong: they cannot fit.
        """
        messages, answers = self._restored(messages)
        text = self._renderer.render(messages, tools)
        self._bounded(text, MAX_TOKEN_CHARS, "characters")
        text = self.images.keyed(text, messages)
        segment, length = self._continued(text)
        prompt_ids, images = self._encoded(segment, text[length:] if segment else text)
        opened = opened_thinking(text) if self._renderer.format.reasoning != "none" else ""
        expected = Expected(self._num_turns, bool(tools) and read_calls, opened)
        return PlannedTurn(segment, text, prompt_ids, expected, len(messages), answers, images)

    def plan_text(self, text: str) -> PlannedTurn:
        """The prompt of the next turn as raw text, which no template touches. Raises PromptTooLong."""
        self._bounded(text, MAX_TOKEN_CHARS, "characters")
        self.images.keyed(text, ())
        segment, length = self._continued(text)
        return self._raw(segment, text, self._encoded(segment, text[length:] if segment else text)[0])

    def plan_ids(self, ids: Sequence[int]) -> PlannedTurn:
        """The prompt of the next turn as token ids.

        Raises:
            RenderError: the tokenizer does not know an id.
            PromptTooLong: there are more than fit.
        """
        self._bounded(ids, 1, "tokens")
        best, length = None, 0
        for segment in self._segments[-MAX_OPEN:]:
            if length < len(segment.ids) < len(ids) and segment.ids == ids[: len(segment.ids)]:
                best, length = segment, len(segment.ids)
        self.images.expanded(list(ids[length:]), (), length)
        for place, token_id in enumerate(ids[length:], length):
            if not self._renderer.knows(token_id):
                raise RenderError(f"prompt[{place}]: the tokenizer has no token {token_id}")
        return self._raw(best, self._renderer.decode_after(ids), list(ids))

    def _bounded(self, prompt: Sized, most_of_each: int, units: str) -> None:
        if self._max_tokens is not None and len(prompt) > self._max_tokens * most_of_each:
            raise PromptTooLong(f"{len(prompt)} {units}")

    def _raw(self, segment: OpenSegment | None, text: str, prompt_ids: list[int]) -> PlannedTurn:
        images = segment.images if segment else ()
        return PlannedTurn(segment, text, prompt_ids, Expected(self._num_turns), 0, {}, images, raw=True)

    def _encoded(self, segment: OpenSegment | None, text: str) -> tuple[list[int], tuple[types.ImageSpan, ...]]:
        """The ids of a prompt that adds keyed text to a segment, or begins one, and the images in all of it."""
        plain, digests = self.images.unkeyed(text)
        if segment is None:
            return self.images.expanded(self._renderer.encode(plain), digests, 0)
        ids, spans = self.images.expanded(self._renderer.encode_after(plain), digests, len(segment.ids))
        return segment.ids + ids, segment.images + spans

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
        if len(self._segments) > MAX_OPEN:
            closed = self._segments[-MAX_OPEN - 1]
            closed.last, closed.answers = None, {}
        last = reply.token_ids[-1] if reply.token_ids else -1
        stop = self._renderer.token_text(last) if last in self._renderer.stop_token_ids else ""
        answered, in_place = reply.text + stop, self._renderer.decode_after(reply.token_ids)
        endings = (in_place,) if turn.raw or answered == in_place else (answered, in_place)
        segment.last = LastTurn(turn.text, reply.text, stop, endings, reply.has_calls)
        segment.answers = turn.answers
        if reply.shown is not None and not turn.raw:
            segment.answers = {**turn.answers, turn.place: (reply.message, reply.shown)}
        segment.ids.extend(turn.prompt_ids[before:])
        segment.images = turn.images
        segment.turns.append((len(segment.ids), reply.logprobs, version))
        segment.ids.extend(reply.token_ids)
        self._num_turns += 1
        self.num_tokens += len(turn.prompt_ids) - before + len(reply.token_ids)

    def _restored(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], Answers]:
        """The conversation with answered messages as the template is to see them, and which these are."""
        best: Answers = {}
        for segment in reversed(self._segments[-MAX_OPEN:]):
            found = {
                place: (answered, shown)
                for place, (answered, shown) in segment.answers.items()
                if place < len(messages) and is_answer(messages[place], answered)
            }
            best = found if len(found) > len(best) else best
        if best:
            messages = [best[place][1] if place in best else message for place, message in enumerate(messages)]
        return messages, best

    def _continued(self, text: str) -> tuple[OpenSegment | None, int]:
        """The segment from which a rendered conversation goes on, the longest one, and how much of the text it is."""
        best, length = None, 0
        for segment in self._segments[-MAX_OPEN:]:
            if segment.last is not None and length < (end := segment.last.end_in(text)) < len(text):
                best, length = segment, end
        if best is not None:
            return best, length
        for segment in self._segments[-MAX_OPEN:]:
            if segment.last is not None and segment.last.has_calls:
                end = segment.last.rewritten_end_in(text, self._renderer)
                if length < end < len(text):
                    best, length = segment, end
        return best, length

    def segments(self) -> list[types.Segment]:
        """All segments, in the order in which they were last extended."""
        return [segment.freeze() for segment in self._segments]
