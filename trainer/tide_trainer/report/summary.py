"""What a run's records say, sorted into frozen data; pure, and calm about whatever is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tide_sdk.statistics import wilson
from tide_trainer.report.formats import number, numbers_of

Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Success on the held-out seeds, by one way of sampling.

    Attributes:
        model_version: the evaluated version; equal to the train steps done.
        success: fraction of `num` episodes.
        num: episodes that ended; None if not recorded.
        low: lower end of the 95% Wilson interval; None without `num`.
        high: its upper end.
        partial: True if fewer episodes than planned ended.
    """

    model_version: float
    success: float
    num: int | None
    low: float | None
    high: float | None
    partial: bool
    mean_reward: float | None
    mean_turns: float | None


@dataclass(frozen=True, slots=True)
class WarmStartPoint:
    """One supervised train step that was recorded."""

    supervised_step: float
    loss: float | None
    sampled: float | None
    greedy: float | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in one piece.

    Attributes:
        status: completed, stopped, failed, or unfinished when no end was recorded.
        steps: the train_step records, each with a finite `model_version`.
        last_phase: the phase in which the run was last seen.
        wall_s: seconds of the whole run, as far as recorded.
        cpu_s: CPU seconds by part, from the end or summed over the train steps.
        alarms: where belief and measurement of a rank's KV parted, raised and cleared.
        num_unready: times that no rank said what its cache held.
    """

    name: str
    started_at: str
    config: Mapping[str, Any]
    status: str
    reason: str
    last_phase: str
    steps: tuple[Mapping[str, Any], ...]
    sampled: tuple[Evaluation, ...]
    greedy: tuple[Evaluation, ...]
    warm_start: tuple[WarmStartPoint, ...]
    account: Mapping[str, float] | None
    num_prompts: float | None
    eta: float | None
    largest_staleness: float | None
    parity_max_abs: float | None
    parity_tolerance: float | None
    wall_s: float | None
    cpu_s: Mapping[str, float]
    peak_rss_bytes: Mapping[str, float]
    num_damaged: int
    alarms: tuple[Mapping[str, Any], ...] = ()
    num_unready: int = 0

    def setting(self, section: str, key: str) -> Any:
        """One value of the resolved configuration, None if it is not there."""
        part = self.config.get(section)
        return part.get(key) if isinstance(part, Mapping) else None

    @property
    def target(self) -> float | None:
        """The success that the run aimed at, None if it had no target."""
        value = number(self.config.get("run"), "target_success")
        return value if value and 0 < value <= 1 else None


def differs(first: Evaluation, last: Evaluation) -> bool:
    """True if two evaluations differ by more than sampling noise (two-sided z-test, 5%)."""
    if not first.num or not last.num:
        return first.success != last.success
    pooled = (first.success * first.num + last.success * last.num) / (first.num + last.num)
    error = math.sqrt(pooled * (1 - pooled) * (1 / first.num + 1 / last.num))
    return error > 0 and abs(last.success - first.success) / error > Z_95


def summarise(records: Sequence[Mapping[str, Any]], *, name: str = "run") -> RunSummary:
    """Sorts the records of metrics.jsonl.

    Args:
        records: as `read_metrics` gives them; fields may be missing, null or of a wrong type.
        name: the run's name if no `run` record has one.
    """
    run = _last(records, "run")
    end = _last(records, "end")
    steps = _steps(records)
    config = run.get("config")
    config = config if isinstance(config, Mapping) else {}
    return RunSummary(
        name=str(run.get("name") or name),
        started_at=str(run.get("started_at") or ""),
        config=config,
        status=str(end.get("status") or "unfinished") if end else "unfinished",
        reason=str(end.get("reason") or ""),
        last_phase=str(_last(records, "phase").get("phase") or ""),
        steps=steps,
        sampled=_evaluations(records, "sampled"),
        greedy=_evaluations(records, "greedy"),
        warm_start=_warm_start(records),
        account=numbers_of(end, "account") if isinstance(end.get("account"), Mapping) else None,
        num_prompts=number(end, "num_prompts"),
        eta=_first_number(number(end, "eta"), number(config.get("algorithm"), "eta")),
        largest_staleness=_largest(steps, end, "staleness_max", "largest_staleness"),
        parity_max_abs=_largest(steps, end, "parity_max_abs", "parity_max_abs"),
        parity_tolerance=number(end, "parity_tolerance"),
        wall_s=_first_number(number(end, "wall_s"), _last_time(records)),
        cpu_s=numbers_of(end, "cpu_s") or _totals(numbers_of(step, "cpu_s") for step in steps),
        peak_rss_bytes=numbers_of(end, "peak_rss_bytes"),
        alarms=tuple(record for record in records if record.get("event") == "alarm"),
        num_unready=sum(record.get("event") == "readiness" and record.get("ready") is False for record in records),
        num_damaged=sum(record.get("event") == "damaged" for record in records),
    )


def _steps(records: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    steps: list[Mapping[str, Any]] = []
    for record in records:
        if record.get("event") == "train_step":
            version = number(record, "model_version")
            steps.append({**record, "model_version": len(steps) + 1 if version is None else version})
    return tuple(steps)


def _evaluations(records: Sequence[Mapping[str, Any]], kind: str) -> tuple[Evaluation, ...]:
    by_version: dict[float, Evaluation] = {}
    for record in records:
        if record.get("event") != "evaluation" or record.get("kind") != kind:
            continue
        success, version = number(record, "success"), number(record, "model_version")
        if success is None or version is None:
            continue
        success = min(1.0, max(0.0, success))
        num = int(number(record, "num") or 0) or None
        low, high = wilson(success, num) if num and num > 0 else (None, None)
        found = Evaluation(
            model_version=version,
            success=success,
            num=num,
            low=low,
            high=high,
            partial=record.get("partial") is True,
            mean_reward=number(record, "mean_reward"),
            mean_turns=number(record, "mean_turns"),
        )
        earlier = by_version.get(version)
        if earlier is None or earlier.partial or not found.partial:
            by_version[version] = found
    return tuple(by_version[version] for version in sorted(by_version))


def _warm_start(records: Sequence[Mapping[str, Any]]) -> tuple[WarmStartPoint, ...]:
    points: list[WarmStartPoint] = []
    for record in records:
        step = number(record, "supervised_step")
        if record.get("event") == "warm_start" and step is not None:
            sampled, greedy = number(record, "sampled_success"), number(record, "greedy_success")
            points.append(WarmStartPoint(step, number(record, "loss"), sampled, greedy))
    return tuple(sorted(points, key=lambda point: point.supervised_step))


def _last(records: Sequence[Mapping[str, Any]], event: str) -> Mapping[str, Any]:
    return next((record for record in reversed(records) if record.get("event") == event), {})


def _last_time(records: Sequence[Mapping[str, Any]]) -> float | None:
    times = [time_s for record in records if (time_s := number(record, "time_s")) is not None]
    return max(times, default=None)


def _first_number(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _largest(steps: Iterable[Mapping[str, Any]], end: Mapping[str, Any], step_key: str, end_key: str) -> float | None:
    values = [number(step, step_key) for step in steps] + [number(end, end_key)]
    return max((value for value in values if value is not None), default=None)


def _totals(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            totals[name] = totals.get(name, 0.0) + amount
    return totals
