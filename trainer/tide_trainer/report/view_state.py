"""What the live view knows: the newest records of a run, folded into plain fields. No drawing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from tide_trainer.report.formats import number

MAX_HISTORY = 60
NUM_TIMED = 10


@dataclass(slots=True)
class ViewState:
    """The run as far as the view was told; `fold` takes one record."""

    name: str
    max_train_steps: int
    eta: int | None = None
    target: float | None = None
    phase: str = "starting"
    num_steps: int = 0
    step: Mapping[str, Any] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    warm_start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] = field(default_factory=dict)
    sampled: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    greedy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    batch: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    time_s: float = 0.0
    alarms: dict[tuple[str, str], str] = field(default_factory=dict)
    ready: bool = True
    _step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMED + 1))

    def fold(self, record: Mapping[str, Any]) -> None:
        """Takes one record; unknown events and missing fields change nothing."""
        self.time_s = max(self.time_s, number(record, "time_s") or 0.0)
        match record.get("event"):
            case "phase":
                self.phase = str(record.get("phase") or self.phase)
                if self.phase == "training":
                    self._step_times_s.append(self.time_s)
            case "train_step":
                self._train_step(record)
            case "evaluation":
                success = number(record, "success")
                if success is not None:
                    history = self.greedy if record.get("kind") == "greedy" else self.sampled
                    history.append((number(record, "model_version") or 0.0, success))
            case "warm_start":
                self.warm_start = record
            case "progress":
                self.progress = record
            case "alarm":
                key = (str(record.get("rank")), str(record.get("kind")))
                if record.get("state") == "raised":
                    self.alarms[key] = str(record.get("message") or "")
                else:
                    self.alarms.pop(key, None)
            case "readiness":
                self.ready = record.get("ready") is not False
            case "end":
                self.end = record
                self.phase = str(record.get("status") or "ended")

    def time_left_s(self, now_s: float) -> float | None:
        """Seconds until the last train step, from the median of the newest ten; None before the first or at the end."""
        times = list(self._step_times_s)
        left = self.max_train_steps - self.num_steps
        if self.end or not self.num_steps or len(times) < 2 or left <= 0:
            return None
        one_s = median(later - earlier for earlier, later in pairwise(times))
        return max(0.0, left * one_s - max(0.0, now_s - times[-1]))

    def _train_step(self, record: Mapping[str, Any]) -> None:
        version = number(record, "model_version")
        self.num_steps = self.num_steps + 1 if version is None else int(version)
        self.step = record
        self._step_times_s.append(self.time_s)
        success = number(record, "success")
        if success is not None:
            self.batch.append(success)


def plain_line(record: Mapping[str, Any], max_train_steps: int) -> str:
    """One record as one line of text; empty for what a log need not hold."""
    match record.get("event"):
        case "phase":
            return f"phase: {record.get('phase')}"
        case "warm_start":
            return "warm start: " + _fields(record, ("supervised_step", "loss", "sampled_success", "greedy_success"))
        case "evaluation":
            short = " (cut short)" if record.get("partial") is True else ""
            fields = _fields(record, ("model_version", "success", "num", "mean_reward", "mean_turns"))
            return f"evaluation, {record.get('kind')}{short}: {fields}"
        case "train_step":
            keys = ("success", "mean_reward", "staleness_max", "goodput_tokens_per_s", "loss", "hit_rate", "num_pauses")
            version = number(record, "model_version")
            step = "?" if version is None else f"{version:.0f}"
            return f"train step {step}/{max_train_steps}: {_fields(record, keys)}"
        case "alarm":
            told = f": {record.get('message')}" if record.get("message") else ""
            return f"alarm {record.get('state')}, {record.get('kind')} at rank {record.get('rank')}{told}"
        case "readiness":
            return "ready again" if record.get("ready") else "not ready: no rollout rank says what its KV cache holds"
        case "end":
            reason = record.get("reason")
            return f"end: {record.get('status')}" + (f" ({reason})" if reason else "")
    return ""


def printable(text: str) -> str:
    """The text without control characters, so that nothing in it can steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _fields(record: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    found = ((key, number(record, key)) for key in keys)
    return " ".join(
        f"{key}={value:.6g}" if abs(value) >= 1e6 else f"{key}={value:.4g}" for key, value in found if value is not None
    )
