"""Puts a recorded trajectory in order for its page: which tokens and which messages belong to which call. Pure.

A call is found in the segments by its numbers of prompt and sampled tokens, a message by its place among the replies or
by its words. What cannot be matched is shown all the same, with a note that says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tide_trainer.report.recorded import RecordedEvent, RecordedSegment, RecordedTrajectory, RecordedTurn

LOOK_AHEAD = 64
"""Calls in which the words of a message are looked for, where messages and calls differ in number."""
EDITED = "The message's words are not those of its tokens: it was parsed or edited, or is matched by its place alone."
NO_MESSAGE = "No message of the conversation belongs to this call."
NO_CALL = "These words were not sampled in a recorded call: a demonstration, or history that the agent wrote."
NO_TOKENS = "The tokens of this call are not in the segments."
NO_RECORD = "Sampled tokens without a record of their call."


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one call in a segment: its new prompt tokens [begin, start), its sampled ones [start, end)."""

    segment: int
    begin: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause at the gateway; `end_s` is the trajectory's end where it was never resumed."""

    start_s: float
    end_s: float
    reason: str
    resumed: str


@dataclass(slots=True)
class Item:
    """One stretch of the page: a call with its tokens, its message, and the messages that followed.

    Attributes:
        turn: the call's record, None where only tokens or only a message are there.
        broken: why a new segment begins here; empty where none does.
        notes: what could not be matched.
    """

    turn: RecordedTurn | None = None
    span: Span | None = None
    message: Mapping[str, Any] | None = None
    after: list[Mapping[str, Any]] = field(default_factory=list)
    events: list[RecordedEvent] = field(default_factory=list)
    broken: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """A trajectory in order: the messages before the first reply, then the calls."""

    opening: tuple[Mapping[str, Any], ...]
    items: tuple[Item, ...]
    pauses: tuple[Pause, ...]


def replay(record: RecordedTrajectory) -> Replay:
    """Orders a trajectory."""
    calls = _calls(record)
    opening, replies = _replies(record.messages)
    items = _matched(calls, replies, record)
    _mark_breaks(items, record.segments)
    _place_events(items, record.events)
    return Replay(tuple(opening), tuple(items), pauses(record))


def pauses(record: RecordedTrajectory) -> tuple[Pause, ...]:
    """Its pauses, in order."""
    found: list[Pause] = []
    since: RecordedEvent | None = None
    for event in record.events:
        if event.kind == "paused":
            since = since or event
        elif event.kind == "resumed" and since is not None:
            found.append(Pause(since.at_s, event.at_s, since.reason, event.reason))
            since = None
    if since is not None:
        found.append(Pause(since.at_s, max(since.at_s, record.duration_s), since.reason, "never resumed"))
    return tuple(found)


def _calls(record: RecordedTrajectory) -> list[Item]:
    """The calls in order, each with its tokens; sampled tokens that no call claims come last."""
    free = [_runs(segment) for segment in record.segments]
    used = [0] * len(free)
    calls: list[Item] = []
    last = 0
    for turn in record.turns:
        start, end = turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens
        order = [last, *(index for index in range(len(free)) if index != last)] if free else []
        where = next((index for index in order if _take(free[index], start, end)), None)
        if where is None:
            calls.append(Item(turn, notes=[NO_TOKENS]))
            continue
        calls.append(Item(turn, Span(where, min(used[where], start), start, end)))
        used[where], last = max(used[where], end), where
    for index, runs in enumerate(free):
        for start, end in runs:
            calls.append(Item(None, Span(index, min(used[index], start), start, end), notes=[NO_RECORD]))
            used[index] = max(used[index], end)
    return calls


def _runs(segment: RecordedSegment) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    position = 0
    for hit, group in groupby(segment.sampled):
        length = sum(1 for _ in group)
        if hit:
            runs.append((position, position + length))
        position += length
    return runs


def _take(runs: list[tuple[int, int]], start: int, end: int) -> bool:
    """Takes [start, end) out of the run that holds it; what is left of the run stays."""
    for index, (low, high) in enumerate(runs):
        if low <= start < end <= high:
            runs[index : index + 1] = [(a, b) for a, b in ((low, start), (end, high)) if a < b]
            return True
    return False


def _replies(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Item]]:
    """The messages before the first reply, and each reply with those that follow it."""
    opening: list[Mapping[str, Any]] = []
    replies: list[Item] = []
    for message in messages:
        if message.get("role") == "assistant":
            replies.append(Item(message=message))
        else:
            (replies[-1].after if replies else opening).append(message)
    return opening, replies


def _matched(calls: list[Item], replies: list[Item], record: RecordedTrajectory) -> list[Item]:
    texts = [_squeezed(_sampled_text(call, record.segments)) for call in calls]
    if len(replies) in (len(calls), len(record.turns)):
        for call, reply, text in zip(calls, replies, texts, strict=False):
            _join(call, reply)
            if call.span is not None and not _says(text, reply.message or {}):
                call.notes.append(EDITED)
        return [*calls[: len(replies)], *_without_message(calls[len(replies) :])]
    items: list[Item] = []
    next_call = 0
    for reply in replies:
        candidates = range(next_call, min(len(calls), next_call + LOOK_AHEAD))
        found = next((index for index in candidates if _says(texts[index], reply.message or {})), None)
        if found is None:
            reply.notes.append(NO_CALL)
            items.append(reply)
            continue
        items += _without_message(calls[next_call:found])
        items.append(_join(calls[found], reply))
        next_call = found + 1
    return items + _without_message(calls[next_call:])


def _join(call: Item, reply: Item) -> Item:
    call.message, call.after = reply.message, reply.after
    return call


def _without_message(calls: list[Item]) -> list[Item]:
    for call in calls:
        call.notes.append(NO_MESSAGE)
    return calls


def _says(text: str, message: Mapping[str, Any]) -> bool:
    """True if a call's sampled text holds what the message says."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    words = _squeezed(content) if isinstance(content, str) else ""
    if words:
        return words in text
    calls = message.get("tool_calls")
    names = [str((call.get("function") or {}).get("name") or "") for call in calls or () if isinstance(call, Mapping)]
    return all(name in text for name in names)


def _sampled_text(call: Item, segments: Sequence[RecordedSegment]) -> str:
    return "".join(segments[call.span.segment].texts[call.span.start : call.span.end]) if call.span else ""


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _mark_breaks(items: Sequence[Item], segments: Sequence[RecordedSegment]) -> None:
    seen: list[int] = []
    for item in items:
        if item.span is None or (seen and seen[-1] == item.span.segment):
            continue
        index = item.span.segment
        if index in seen:
            item.broken = f"The conversation goes on in segment {index + 1}."
        elif seen:
            item.broken = f"Segment {index + 1} begins. " + _difference(segments, index, seen)
        seen.append(index)


def _difference(segments: Sequence[RecordedSegment], index: int, seen: Sequence[int]) -> str:
    """Why a segment does not go on from an earlier one, told by the tokens."""
    here = segments[index]
    best, common = seen[-1], -1
    for earlier in dict.fromkeys(reversed(seen)):
        length = _common(segments[earlier].token_ids, here.token_ids)
        if length > common:
            best, common = earlier, length
    there = segments[best]
    if common == 0:
        return "Its prompt shares no beginning with an earlier segment: it is another conversation."
    agree = f"Its prompt agrees with segment {best + 1} in the first {common:,} tokens"
    if common >= len(there.token_ids):
        return f"{agree}, which are all of it, but another call went on from there in between."
    if common >= len(here.token_ids):
        return f"{agree} and ends there: the history was cut."
    had, has = (_excerpt(segment.texts[common : common + 8]) for segment in (there, here))
    return f"{agree}; then the history was “{had}” and now is “{has}”."


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _excerpt(texts: Sequence[str]) -> str:
    return " ".join("".join(texts).split())[:60] or "white space"


def _place_events(items: Sequence[Item], events: Sequence[RecordedEvent]) -> None:
    """Each event goes to the call in which it happened, or to the next one."""
    calls = [(item.turn.end_s, item) for item in items if item.turn is not None]
    position = 0
    for event in sorted(events, key=lambda event: event.at_s):
        while position < len(calls) and calls[position][0] < event.at_s:
            position += 1
        if position < len(calls):
            calls[position][1].events.append(event)
        elif items:
            items[-1].events.append(event)
