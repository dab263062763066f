"""Tokens as coloured spans, and prompts as pale ones; bounded. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup, escape

from tide_trainer.report.charts import TONES
from tide_trainer.report.elements import element, joined
from tide_trainer.report.recorded import RecordedSegment, RecordedTrajectory
from tide_trainer.report.replay import Span
from tide_trainer.report.trajectories import EDGES

MAX_SPANS = 60_000
MAX_PLAIN_CHARS = 2_000_000
MAX_TOKEN_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class TokenView:
    """The tokens of one call.

    Attributes:
        prompt: new prompt tokens, pale; images are single marks that lead to the picture.
        sampled: sampled tokens, coloured by classes.
        mean_logprob: over the sampled tokens; None if none is known.
    """

    prompt: Markup
    sampled: Markup
    num_prompt: int
    num_sampled: int
    mean_logprob: float | None


class TokenPages:
    """Writes the tokens of one trajectory while there is room for spans; later ones come as plain text, or not at all.

    Args:
        record: whose tokens.
    """

    def __init__(self, record: RecordedTrajectory) -> None:
        self._segments = record.segments
        self._tones = {version: index % TONES + 1 for index, version in enumerate(record.versions)}
        # The sampled tokens are what the page is about: they take what room there is before any prompt does.
        self._sampled_left = MAX_SPANS
        self._prompt_left = max(0, MAX_SPANS - sum(sum(segment.sampled) for segment in record.segments))
        self._chars_left = MAX_PLAIN_CHARS
        self.num_plain = 0
        self.num_missing = 0

    @property
    def tones(self) -> dict[int, int]:
        """The colour of each model version, 1 to 8."""
        return self._tones

    def view(self, span: Span) -> TokenView:
        """The tokens of one call."""
        segment = self._segments[span.segment]
        sampled = self._sampled(segment, span.start, span.end)
        prompt = self._prompt(segment, span.begin, span.start)
        logprobs = [value for value in segment.logprobs[span.start : span.end] if value is not None]
        mean = math.fsum(logprobs) / len(logprobs) if logprobs else None
        return TokenView(prompt, sampled, span.start - span.begin, span.end - span.start, mean)

    def rest(self, segment: int, begin: int) -> Markup:
        """What stands behind the last call of a segment."""
        return self._prompt(self._segments[segment], begin, len(self._segments[segment].token_ids))

    def _sampled(self, segment: RecordedSegment, start: int, end: int) -> Markup:
        coloured = min(end, start + self._sampled_left)
        self._sampled_left -= coloured - start
        parts = [self._token(segment, index) for index in range(start, coloured)]
        return joined([*parts, self._plain(segment, coloured, end)])

    def _token(self, segment: RecordedSegment, index: int) -> Markup:
        logprob, version = segment.logprobs[index], segment.versions[index]
        tone = self._tones.get(version, TONES)
        told = f"token {segment.token_ids[index]}"
        level = "q"
        if logprob is not None:
            share = math.exp(min(0.0, logprob))
            level = str(sum(share < edge for edge in EDGES))
            told += f" · log-prob {logprob:.3f} · {100 * share:.3g}%"
        if version >= 0:
            told += f" · version {version}"
        return element("i", _shown(segment.texts[index]), class_=f"k p{level} v{tone}", title=told)

    def _prompt(self, segment: RecordedSegment, begin: int, end: int) -> Markup:
        parts: list[Markup] = []
        for image in segment.images:
            if begin <= image.start < end:
                parts += [self._ids(segment, begin, image.start), _image_mark(image.digest, image.num_tokens)]
                begin = min(end, image.start + image.num_tokens)
        parts.append(self._ids(segment, begin, end))
        return joined(parts)

    def _ids(self, segment: RecordedSegment, begin: int, end: int) -> Markup:
        spelled = min(end, begin + self._prompt_left)
        self._prompt_left -= spelled - begin
        parts = [
            element("u", _shown(segment.texts[index]), title=f"token {segment.token_ids[index]}")
            for index in range(begin, spelled)
        ]
        return joined([*parts, self._plain(segment, spelled, end)])

    def _plain(self, segment: RecordedSegment, begin: int, end: int) -> Markup:
        text = "".join(segment.texts[begin:end])
        if not text:
            return Markup()
        self.num_plain += end - begin
        kept = text[: self._chars_left]
        self._chars_left -= len(kept)
        if len(kept) < len(text):
            self.num_missing += 1
            kept += " …"
        return Markup("<s>{}</s>").format(kept)


def _shown(text: str) -> Markup:
    """A token's text; a line break gets a mark, an empty text a sign."""
    if not text:
        return Markup("<b>∅</b>")
    return escape(text[:MAX_TOKEN_CHARS]).replace("\n", Markup("<b>↵</b>\n"))


def _image_mark(digest: str, num_tokens: int) -> Markup:
    return element("a", f"image, {num_tokens:,} tokens", class_="mark-image", href=f"#image-{digest[:16]}")
