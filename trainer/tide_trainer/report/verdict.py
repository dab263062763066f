"""The run in words: one sentence, the key figures, and the invariants as OK or breach. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tide_trainer.report.formats import MISSING, count, number, percent, quantity, seconds, size_of
from tide_trainer.report.summary import Evaluation, RunSummary, differs
from tide_trainer.report.turn_cpu import GOAL_MS, SCHEDULER_GOAL_MS, turn_cpu

State = Literal["OK", "breach", "not recorded"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One key figure: what it is, the value with its unit, and a short note."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant of the run: the rule, its state, and what was measured in plain words."""

    rule: str
    state: State
    measured: str


def verdict(run: RunSummary) -> str:
    """One sentence that says how the run ended and whether the agent got better."""
    steps = _train_steps(len(run.steps))
    reason = f" ({run.reason.rstrip('.')})" if run.reason else ""
    learned = _learned(run)
    if run.status == "failed":
        return f"The run failed after {steps}{reason}; {learned}."
    if run.status == "stopped":
        return f"The run was stopped after {steps}{reason}; {learned}."
    if run.status == "unfinished":
        phase = f" in the phase “{run.last_phase}”" if run.last_phase else ""
        return f"The run has no recorded end: it still goes on, or it was killed{phase} after {steps}; {learned}."
    return f"{learned[0].upper()}{learned[1:]}."


def first_and_last(points: tuple[Evaluation, ...]) -> tuple[Evaluation | None, Evaluation | None]:
    """The first and the last evaluation to be judged by: whole ones where there are any."""
    judged = [point for point in points if not point.partial] or list(points)
    return (judged[0], judged[-1]) if judged else (None, None)


def _learned(run: RunSummary) -> str:
    first, last = first_and_last(run.sampled)
    if first is None or last is None:
        return "success on held-out seeds was never evaluated, so nothing can be said about learning"
    seeds = f"sampled success on {last.num:,} held-out seeds" if last.num else "sampled success on held-out seeds"
    before, after = percent(first.success), percent(last.success)
    if first is last:
        return f"{seeds} was {after} at model version {last.model_version:.0f}, the only evaluation"
    if not differs(first, last):
        change = f"{seeds} went from {before} to {after}, within sampling noise"
    elif last.success > first.success:
        change = f"the agent got better: {seeds} rose from {before} to {after}"
    else:
        change = f"the agent got worse: {seeds} fell from {before} to {after}"
    change += f" in {_train_steps(last.model_version - first.model_version)}"
    if run.target is None:
        return change
    reached = "reached" if last.success >= run.target else "not reached"
    return f"{change}, and the target of {percent(run.target)} was {reached}"


def _train_steps(num: float) -> str:
    return f"{num:,.0f} train step{'' if num == 1 else 's'}"


def key_figures(run: RunSummary) -> list[Figure]:
    """The figures at the top of the report."""
    first, last = first_and_last(run.sampled)
    _, greedy = first_and_last(run.greedy)
    trained, goodput, hits = (_recorded(run, key) for key in ("num_trained_tokens", "goodput_tokens_per_s", "hit_rate"))
    planned = run.setting("run", "max_train_steps")
    total_cpu = sum(run.cpu_s.values()) if run.cpu_s else None
    peak = sum(run.peak_rss_bytes.values()) if run.peak_rss_bytes else None
    start = f"from {percent(first.success)} at the start" if first is not None and first is not last else ""
    of_turn = turn_cpu(run.steps)
    interval = f"95% interval {percent(last.low)} to {percent(last.high)}" if last and last.low is not None else ""
    return [
        Figure("Sampled success", percent(last.success if last else None), start or interval),
        Figure(
            "Greedy success",
            percent(greedy.success if greedy else None),
            f"temperature 0, at version {greedy.model_version:.0f}" if greedy else "temperature 0",
        ),
        Figure("Train steps", count(len(run.steps)), f"of at most {planned:,}" if isinstance(planned, int) else ""),
        Figure("Wall time", seconds(run.wall_s), f"{seconds(total_cpu)} of CPU" if total_cpu is not None else ""),
        Figure(
            "CPU of a turn",
            f"{of_turn.serving_ms:.2f} ms" if of_turn else MISSING,
            f"scheduler, router and gateway; goal: at most {GOAL_MS:g} ms",
        ),
        Figure(
            "Scheduling a turn",
            f"{of_turn.scheduler_ms:.3f} ms" if of_turn else MISSING,
            f"CPU; goal: at most {SCHEDULER_GOAL_MS:g} ms",
        ),
        Figure("Goodput", f"{quantity(_mean(goodput))} tok/s" if goodput else MISSING, "mean, trained tokens"),
        Figure("Trained tokens", quantity(sum(trained)) if trained else MISSING, "sampled by the model"),
        Figure("Prefix-cache hits", percent(_mean(hits)), "mean, of prompt tokens"),
        Figure("Peak memory", size_of(peak), "sum of all processes' peaks"),
    ]


def _recorded(run: RunSummary, key: str) -> list[float]:
    return [value for step in run.steps if (value := number(step, key)) is not None]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def checks(run: RunSummary) -> list[Check]:
    """The invariants that the run's records can confirm or refute."""
    return [_prompts(run), _staleness(run), _parity(run), _footprints(run)]


def breached(run: RunSummary) -> list[str]:
    """The rules that the run broke."""
    return [check.rule for check in checks(run) if check.state == "breach"]


def _prompts(run: RunSummary) -> Check:
    rule = "Every prompt is trained exactly once, or dropped with a reason"
    if run.account is None:
        return Check(rule, "not recorded", "The run did not record its account of prompts.")
    trained = run.account.get("trained", 0.0)
    dropped = {key: amount for key, amount in run.account.items() if key.startswith("dropped")}
    open_ends = {key: n for key, n in run.account.items() if key != "trained" and key not in dropped and n}
    total = trained + sum(dropped.values())
    words = f"{count(trained)} trained + {count(sum(dropped.values()))} dropped = {count(total)} prompts"
    words += _reasons(dropped)
    if open_ends:
        return Check(rule, "breach", f"{words}; not accounted: {_listed(open_ends)}")
    if run.num_prompts is not None and run.num_prompts != total:
        return Check(rule, "breach", f"{words}, but {count(run.num_prompts)} were drawn")
    return Check(rule, "OK", words)


def _reasons(dropped: Mapping[str, float]) -> str:
    reasons = {key.partition(":")[2].strip() or "no reason given": amount for key, amount in dropped.items() if amount}
    return f" (dropped: {_listed(reasons)})" if reasons else ""


def _listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {count(amount)}" for key, amount in amounts.items())


def _staleness(run: RunSummary) -> Check:
    rule = "V_traj + eta ≥ V_buf: no trained trajectory is older than the bound"
    if run.largest_staleness is None or run.eta is None:
        return Check(rule, "not recorded", "The run did not record its staleness, or its bound.")
    state: State = "OK" if run.largest_staleness <= run.eta else "breach"
    return Check(rule, state, f"largest staleness {run.largest_staleness:g}, bound eta = {run.eta:g}")


def _footprints(run: RunSummary) -> Check:
    rule = "Footprints: what the scheduler believes is what the engines measure"
    watch = run.setting("rollout", "watch")
    interval_s = number(watch, "interval_s") if isinstance(watch, Mapping) else None
    if not interval_s:
        return Check(rule, "not recorded", "The run did not look at its engines' live KV use.")
    raised = [alarm for alarm in run.alarms if alarm.get("state") == "raised"]
    if not raised and not run.num_unready:
        return Check(rule, "OK", f"no alarm; every rank was looked at each {interval_s:g} s")
    by_kind: dict[str, float] = {}
    for alarm in raised:
        kind = str(alarm.get("kind"))
        by_kind[kind] = by_kind.get(kind, 0.0) + 1
    words = f"alarms: {_listed(by_kind)}; the last one: {raised[-1].get('message')}" if raised else ""
    unready = f"no rank said what its cache held, {run.num_unready} times" if run.num_unready else ""
    return Check(rule, "breach", "; ".join(part for part in (words, unready) if part))


def _parity(run: RunSummary) -> Check:
    rule = "Parity: the trainer's log-probs agree with the engine's"
    if run.parity_max_abs is None:
        return Check(rule, "not recorded", "The run did not compare log-probs.")
    measured = f"largest difference {run.parity_max_abs:.2g}"
    if run.parity_tolerance is None:
        return Check(rule, "not recorded", f"{measured}, but no tolerance was recorded")
    state: State = "OK" if run.parity_max_abs <= run.parity_tolerance else "breach"
    return Check(rule, state, f"{measured} nats, tolerance {run.parity_tolerance:.2g}")
