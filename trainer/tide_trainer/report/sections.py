"""Which charts the report shows, in which order, and from which fields. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tide_trainer.report.charts import TONES, Figure, Series, line_chart, stacked_bars
from tide_trainer.report.formats import number, numbers_of, percent
from tide_trainer.report.summary import RunSummary


def charts(run: RunSummary) -> list[Figure]:
    """All charts under the learning curve; a chart without a single value has an empty drawing."""
    return [*_learning(run), *_scheduling(run), *_time(run), *_optimizer(run)]


def _learning(run: RunSummary) -> list[Figure]:
    evaluated = [(p.model_version, p.mean_reward) for p in run.sampled]
    turns = [(p.model_version, p.mean_turns) for p in run.sampled]
    return [
        line_chart(
            "Reward",
            [Series("held-out, sampled", evaluated, 1, markers=True), _line(run, "training batch", "mean_reward", 3)],
            unit="per episode",
        ),
        line_chart(
            "Turns",
            [Series("held-out, sampled", turns, 1, markers=True), _line(run, "training batch", "mean_turns", 3)],
            unit="per episode",
        ),
        line_chart(
            "Staleness",
            [_line(run, "largest", "staleness_max", 2), _line(run, "mean", "staleness_mean", 1)],
            unit="model versions",
            reference=None if run.eta is None else (run.eta, f"bound eta = {run.eta:g}"),
        ),
    ]


def _scheduling(run: RunSummary) -> list[Figure]:
    return [
        line_chart(
            "KV cache",
            [
                _line(run, "believed", "kv_usage", 1),
                _line(run, "measured", "kv_measured", 3),
            ],
            unit="largest share of a rank's budget in the train step",
            text=percent,
            reference=(1.0, "budget"),
        ),
        line_chart(
            "Goodput",
            [_line(run, "trained tokens", "goodput_tokens_per_s", 1)],
            unit="tokens/s",
        ),
        line_chart(
            "Prefix-cache hit rate",
            [_line(run, "of prompt tokens", "hit_rate", 1)],
            text=percent,
            y_domain=(0.0, 1.0),
        ),
        stacked_bars(
            "Pauses, aborts and starts without a place",
            [
                _line(run, "pauses", "num_pauses", 1),
                _line(run, "calls taken back", "num_aborts", 2),
                _line(run, "starts put back", "num_requeues", 3),
            ],
            unit="per train step",
        ),
    ]


def _time(run: RunSummary) -> list[Figure]:
    return [
        stacked_bars(
            "Waits",
            [
                _line(run, "rollout waits (RWT)", "rollout_wait_s", 1),
                _line(run, "training waits (TWT)", "training_wait_s", 2),
            ],
            unit="s per train step",
        ),
        stacked_bars(
            "Training and sync",
            [_line(run, "training", "train_wall_s", 3), _line(run, "weight sync", "sync_wall_s", 4)],
            unit="s of wall time per train step",
        ),
        stacked_bars("CPU by part", _parts(run), unit="CPU s per train step"),
    ]


def _optimizer(run: RunSummary) -> list[Figure]:
    return [
        line_chart("Loss", [_line(run, "policy loss", "loss", 1)], zero=False),
        line_chart("Entropy", [_line(run, "per sampled token", "entropy", 1)], unit="nats"),
        line_chart("Gradient norm", [_line(run, "before the clip", "grad_norm", 1)]),
    ]


def _line(run: RunSummary, label: str, key: str, tone: int) -> Series:
    return _series(run, label, tone, lambda step: number(step, key))


def _series(run: RunSummary, label: str, tone: int, value: Callable[[Mapping[str, Any]], float | None]) -> Series:
    return Series(label, [(float(step["model_version"]), value(step)) for step in run.steps], tone)


def _parts(run: RunSummary) -> list[Series]:
    """CPU by part, the largest first; the smallest join as `other` where the colours run out."""
    totals: dict[str, float] = {}
    for step in run.steps:
        for part, amount in numbers_of(step, "cpu_s").items():
            totals[part] = totals.get(part, 0.0) + amount
    ordered = sorted(totals, key=lambda part: -totals[part])
    named = ordered if len(ordered) <= TONES else ordered[: TONES - 1]
    rest = ordered[len(named) :]
    series = [_part_series(run, part, (part,), tone) for tone, part in enumerate(named, start=1)]
    return [*series, _part_series(run, "other", tuple(rest), TONES)] if rest else series


def _part_series(run: RunSummary, label: str, parts: tuple[str, ...], tone: int) -> Series:
    def total(step: Mapping[str, Any]) -> float | None:
        amounts = numbers_of(step, "cpu_s")
        return sum(amounts.get(part, 0.0) for part in parts) if amounts else None

    return _series(run, label, tone, total)
