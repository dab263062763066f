"""The page of one recorded trajectory: self-contained, offline, of bounded size; everything on it is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_sdk.images import media_type_of
from tide_trainer.errors import TrainerError
from tide_trainer.images import ImageStore
from tide_trainer.report.footprint import footprint_chart, time_line
from tide_trainer.report.formats import MISSING, moment, quantity, seconds
from tide_trainer.report.pages import page_file, script_hash, templates, write_page
from tide_trainer.report.recorded import RecordedTrajectory
from tide_trainer.report.replay import Item, replay
from tide_trainer.report.replay_messages import MessagePages, MessageView, PageImage
from tide_trainer.report.replay_tokens import TokenPages, TokenView
from tide_trainer.report.trajectories import LEGEND

MAX_ITEMS = 2_000
MAX_ALL_IMAGE_BYTES = 24 * 1024 * 1024
MAX_ONE_IMAGE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ItemView:
    """One stretch of the page, laid out; where the tokens say all that the message says, `plain_reply` is True."""

    item: Item
    heading: str
    facts: tuple[str, ...]
    message: MessageView | None
    plain_reply: bool
    tokens: TokenView | None
    reward: float | None
    granted: str
    after: list[MessageView]


class PageImages:
    """Images from a run's store as data URLs: each once, while there is room.

    Args:
        store: the run's image store.
        max_bytes: of all images of the page.
    """

    def __init__(self, store: ImageStore, max_bytes: int = MAX_ALL_IMAGE_BYTES) -> None:
        self._store = store
        self._room = max_bytes
        self._known: dict[str, PageImage] = {}
        self.num_left_out = 0
        self.num_missing = 0

    def of(self, digest: str, problem: str) -> PageImage:
        """The image of a digest; shown once, then a link. Without a digest: the problem's words."""
        anchor = f"image-{digest[:16]}"
        if not digest:
            return PageImage("", "", "", problem)
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = self._read(digest, anchor)
            return known
        return PageImage(digest, "", anchor, known.problem)

    def _read(self, digest: str, anchor: str) -> PageImage:
        try:
            data = self._store.read(digest)
        except (TrainerError, ValueError) as error:
            self.num_missing += 1
            return PageImage(digest, "", anchor, str(error))
        media_type = media_type_of(data)
        if media_type is None:
            self.num_missing += 1
            return PageImage(digest, "", anchor, "the file is no PNG, JPEG, GIF or WebP image")
        if len(data) > min(self._room, MAX_ONE_IMAGE_BYTES):
            self.num_left_out += 1
            return PageImage(digest, "", anchor, f"{len(data):,} bytes are too many for this page")
        self._room -= len(data)
        return PageImage(digest, f"data:{media_type};base64,{base64.b64encode(data).decode()}", anchor)


def render_trajectory(record: RecordedTrajectory, images_folder: Path) -> str:
    """The page as text."""
    order = replay(record)
    images, tokens = PageImages(ImageStore(images_folder)), TokenPages(record)
    messages = MessagePages(images.of)
    opening = messages.views(order.opening)
    rewards = record.rewards if len(record.rewards) == sum(item.message is not None for item in order.items) else ()
    views: list[ItemView] = []
    num_replies = 0
    for item in order.items[:MAX_ITEMS]:
        reward = rewards[num_replies] if item.message is not None and rewards else None
        num_replies += item.message is not None
        views.append(_item_view(item, reward, messages, tokens))
    script = page_file("trajectory.js")
    return (
        templates()
        .get_template("trajectory.html.j2")
        .render(
            record=record,
            facts=_facts(record, order.pauses),
            opening=opening,
            views=views,
            figures=[chart for chart in (footprint_chart(record, order), time_line(record, order.pauses)) if chart.svg],
            pauses=order.pauses,
            tails=_tails(order.items, tokens, record),
            unseen=[images.of(digest, "") for digest in _unseen(record, opening, views)],
            left_out=[*record.left_out, *_left_out(order.items, images, tokens, messages)],
            levels=LEGEND,
            tones=tokens.tones,
            seconds=seconds,
            moment=moment,
            quantity=quantity,
            style=page_file("report.css") + page_file("trajectory.css"),
            script=script,
            script_hash=script_hash(script),
        )
    )


def write_trajectory(record: RecordedTrajectory, images_folder: Path, target: Path) -> Path:
    """Writes the page; returns its path.

    Raises:
        ReportFailed: it cannot be written.
    """
    return write_page(target, render_trajectory(record, images_folder))


def _item_view(item: Item, reward: float | None, messages: MessagePages, tokens: TokenPages) -> ItemView:
    message = messages.view(item.message) if item.message is not None else None
    view = tokens.view(item.span) if item.span is not None else None
    plain = message is not None and not (message.calls or message.reasoning or message.images or message.extra)
    heading = f"Turn {item.turn.turn}" if item.turn is not None else ("Message" if item.span is None else "Tokens")
    return ItemView(
        item=item,
        heading=heading,
        facts=_turn_facts(item, view),
        message=message,
        plain_reply=plain and view is not None and not item.notes,
        tokens=view,
        reward=reward,
        granted=_granted(item),
        after=messages.views(item.after),
    )


def _granted(item: Item) -> str:
    """The reason of the grant, unless a resume has just told the same."""
    told = {event.reason for event in item.events}
    return item.turn.reason if item.turn is not None and item.turn.reason not in told else ""


def _turn_facts(item: Item, view: TokenView | None) -> tuple[str, ...]:
    turn = item.turn
    facts: list[str] = []
    if turn is not None:
        facts.append(f"{turn.prompt_tokens:,} prompt tokens, {turn.cached_tokens:,} cached")
        if turn.image_tokens:
            facts.append(f"{turn.image_tokens:,} of images")
        facts.append(f"{turn.completion_tokens:,} sampled ({turn.finish_reason or 'end unknown'})")
        facts.append(f"held {seconds(turn.held_s)}, engine {seconds(turn.engine_s)}")
        if turn.rank:
            facts.append(f"rank {turn.rank}")
        if turn.model_version >= 0:
            facts.append(f"version {turn.model_version}")
    if view is not None and view.mean_logprob is not None:
        facts.append(f"mean log-prob {view.mean_logprob:.3f}")
    return tuple(facts)


def _facts(record: RecordedTrajectory, pauses: Sequence[Any]) -> list[tuple[str, str]]:
    versions = record.versions
    sampled = sum(sum(segment.sampled) for segment in record.segments)
    total = sum(len(segment.token_ids) for segment in record.segments)
    paused_s = sum(pause.end_s - pause.start_s for pause in pauses)
    staleness = MISSING if not versions else f"{max(0, record.end_version - versions[0])}"
    shown = [str(version) for version in versions[:6]] + (["…"] if len(versions) > 6 else [])
    return [
        ("reward", MISSING if record.reward is None else f"{record.reward:.4g}"),
        ("turns", f"{record.num_turns:,}"),
        ("model calls", f"{len(record.turns):,}"),
        ("tokens", f"{total:,}, {sampled:,} sampled"),
        ("segments", f"{len(record.segments)}"),
        ("model version", ", ".join(shown) or MISSING),
        ("versions behind at its end", staleness),
        ("duration", seconds(record.duration_s)),
        ("paused", f"{len(pauses)} times, {seconds(paused_s)}" if pauses else "never"),
    ]


def _tails(items: Sequence[Item], tokens: TokenPages, record: RecordedTrajectory) -> list[tuple[int, Any]]:
    """Tokens behind the last call of each segment."""
    ends = dict.fromkeys(range(len(record.segments)), 0)
    for item in items:
        if item.span is not None:
            ends[item.span.segment] = max(ends[item.span.segment], item.span.end)
    lengths = ((index, end) for index, end in ends.items() if end < len(record.segments[index].token_ids))
    return [(index + 1, tokens.rest(index, end)) for index, end in lengths]


def _unseen(record: RecordedTrajectory, opening: Sequence[MessageView], views: Sequence[ItemView]) -> list[str]:
    """Digests of images that stand in the tokens but in no message."""
    laid_out = [*opening, *(one.message for one in views if one.message), *(m for one in views for m in one.after)]
    shown = {image.digest for message in laid_out for image in message.images}
    return [
        digest for digest in dict.fromkeys(i.digest for s in record.segments for i in s.images) if digest not in shown
    ]


def _left_out(items: Sequence[Item], images: PageImages, tokens: TokenPages, messages: MessagePages) -> list[str]:
    told = (
        (max(0, len(items) - MAX_ITEMS), "turns at the end"),
        (images.num_missing, "images that cannot be read"),
        (images.num_left_out, "images beyond the page's bound"),
        (messages.num_cut, "long texts, cut"),
        (tokens.num_plain, "tokens without colours, beyond the page's bound"),
        (tokens.num_missing, "stretches of tokens, cut"),
    )
    return [f"{num:,} {what}" for num, what in told if num]
