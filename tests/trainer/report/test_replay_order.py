from __future__ import annotations

import zlib
from typing import Any

import pytest
from recorded_examples import browser_task

from tide_trainer.report.footprint import footprint_chart, lanes, parts_of, time_line
from tide_trainer.report.recorded import RecordedTrajectory
from tide_trainer.report.replay import EDITED, NO_CALL, NO_MESSAGE, NO_RECORD, NO_TOKENS, Span, pauses, replay


def recorded(**changes: Any) -> RecordedTrajectory:
    return RecordedTrajectory.model_validate(browser_task() | changes)


def segment(*texts: str) -> dict[str, Any]:
    """Words; those with a star are sampled."""
    sampled = [text.startswith("*") for text in texts]
    return {
        "token_ids": [zlib.crc32(text.encode()) for text in texts],
        "texts": [text.removeprefix("*") for text in texts],
        "sampled": sampled,
        "logprobs": [-0.5 if hit else None for hit in sampled],
        "versions": [0 if hit else -1 for hit in sampled],
    }


def turn(number: int, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    times = {"call_s": number, "held_s": 0, "engine_s": 0.1, "end_s": number + 0.1, "cached_tokens": 0}
    tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"turn": number, **times, **tokens, "context_tokens": prompt_tokens + completion_tokens}


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if text.startswith("*") else "user", "content": text.strip("*")} for text in contents]


def small(segments: list[Any], turns: list[Any], messages: list[Any], **changes: Any) -> Any:
    bare = {"rewards": [], "events": []}
    return replay(recorded(segments=segments, turns=turns, messages=messages, **bare, **changes))


def test_every_call_finds_its_tokens_its_message_and_what_followed() -> None:
    order = replay(recorded())
    assert [message["role"] for message in order.opening] == ["system", "user"]
    assert len(order.items) == 6
    assert not any(item.notes for item in order.items)
    assert order.items[0].span == Span(0, 0, 27, 48)
    assert order.items[1].span is not None
    assert order.items[1].span.begin == 48, "only what is new since the last call"
    assert [message["role"] for message in order.items[3].after] == ["tool"]


def test_a_new_segment_is_a_break_that_tells_where_the_prompts_part() -> None:
    order = replay(recorded())
    broken = [item.broken for item in order.items if item.broken]
    assert len(broken) == 1
    assert broken[0].startswith("Segment 2 begins. Its prompt agrees with segment 1 in the first 5 tokens")
    assert "Answer with one tool call" in broken[0]
    assert "Here is a summary" in broken[0]


def test_other_reasons_of_a_break() -> None:
    other = small([segment("q", "*a"), segment("x", "*b")], [turn(0, 1, 1), turn(1, 1, 1)], said("q", "*a", "o", "*b"))
    assert "shares no beginning" in other.items[1].broken
    again = segment("q", "*a", "o", "*b")
    again["sampled"][1] = False
    branch = small([segment("q", "*a"), again], [turn(0, 1, 1), turn(1, 3, 1)], said("q", "*a", "o", "*b"))
    assert "which are all of it, but another call went on from there" in branch.items[1].broken


def test_two_conversations_in_turn_are_followed_to_and_fro() -> None:
    one, two = segment("q", "*a", "r", "*b"), segment("z", "*c")
    order = small([one, two], [turn(0, 1, 1), turn(1, 1, 1), turn(2, 3, 1)], said("q", "*a", "z", "*c", "r", "*b"))
    assert [item.span.segment for item in order.items if item.span] == [0, 1, 0]
    assert order.items[2].broken == "The conversation goes on in segment 1."


def test_a_call_without_tokens_and_tokens_without_a_call_are_both_shown() -> None:
    order = small([segment("q", "*a", "r", "*b")], [turn(0, 1, 1), turn(1, 99, 1)], said("q", "*a", "r", "*zzz"))
    assert [item.notes for item in order.items] == [[], [NO_TOKENS], [NO_RECORD, NO_MESSAGE]]
    assert order.items[-1].span == Span(0, 2, 3, 4)


def test_messages_that_were_never_sampled_are_told_apart_by_their_words() -> None:
    messages = said("q", "*a demonstration", "q", "*right left", "r", "*stop")
    order = small([segment("q", "*right ", "*left", "r", "*stop")], [turn(0, 1, 2), turn(1, 4, 1)], messages)
    assert [(item.turn is not None, item.notes) for item in order.items] == [(False, [NO_CALL]), (True, []), (True, [])]
    assert order.items[1].message == messages[3]


def test_calls_that_left_no_message_are_shown_in_their_place() -> None:
    one = segment("q", "*secret", "r", "*stop")
    order = small([one], [turn(0, 1, 1), turn(1, 3, 1)], said("q", "*stop"))
    assert [item.notes for item in order.items] == [[NO_MESSAGE], []]


def test_a_message_with_other_words_than_its_tokens_is_marked() -> None:
    order = small([segment("q", "*a")], [turn(0, 1, 1)], said("q", "*something else"))
    assert order.items[0].notes == [EDITED]


def test_nothing_recorded_but_messages() -> None:
    order = small([], [], said("q", "*a"))
    assert [item.notes for item in order.items] == [[NO_CALL]]
    assert small([], [], []).items == ()


def test_pauses_have_their_times_and_reasons_and_an_open_one_lasts_to_the_end() -> None:
    record = recorded()
    found = pauses(record)
    assert [(round(one.end_s - one.start_s, 2), one.resumed) for one in found] == [(3.49, "fits after 3.5 s")] * 2
    assert found[0].reason.startswith("needs ")
    events = [{"at_s": 1.0, "kind": "paused", "reason": "full"}]
    (last,) = pauses(recorded(events=events))
    assert (last.end_s, last.resumed) == (record.duration_s, "never resumed")
    assert [event.kind for event in replay(record).items[2].events] == ["paused", "resumed"]


def test_the_footprint_tells_cached_text_images_and_completion_apart(tmp_path) -> None:
    record = RecordedTrajectory.model_validate(browser_task(tmp_path))
    parts = parts_of(record, replay(record))
    for one, call in zip(parts, record.turns, strict=True):
        assert one.cached + one.text + one.image + one.completion == call.context_tokens
    assert [one.image for one in parts] == [0, 96, 96, 96, 0, 96], "only images that were not in the cache"


def test_the_time_line_adds_up_to_the_duration() -> None:
    record = recorded()
    rows = {lane.label: lane.total_s for lane in lanes(record, pauses(record))}
    spent = sum(value for label, value in rows.items() if label != "paused, of that")
    assert spent == pytest.approx(record.duration_s)
    assert rows["paused, of that"] == pytest.approx(6.98)


def test_the_charts_show_pauses_prediction_and_a_budget_within_sight() -> None:
    tall = [call | {"budget_tokens": 950} for call in browser_task()["turns"]]
    record = recorded(turns=tall)
    chart = footprint_chart(record, replay(record))
    assert chart.svg.count('class="paused"') == 2
    assert chart.svg.count('class="t8 dashed"') == 1
    assert "budget 950" in chart.svg
    far = footprint_chart(recorded(), replay(recorded()))
    assert "budget 1" not in far.svg
    assert "1,920 tokens, lies above" in far.note
    assert time_line(record, pauses(record)).svg.count('class="paused"') == 2
    assert not time_line(recorded(turns=[]), ()).svg
