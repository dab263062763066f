"""What is noted of one attempt while it runs, for people who look at it later; and which attempts are. Pure.

Only recorded attempts are noted: a few numbers a turn, in memory, bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tide_trainer.report.recorded import EarlierAttempt, RecordedEvent, RecordedTurn
from tide_trainer.scheduling.plan import Admit, Decision, Grant, Pause, RankView, Refuse, Resume
from tide_trainer.types import Kind, Prompt

MAX_TURNS = 10_000
MAX_EVENTS = 10_000
MAX_REASON_CHARS = 500


@dataclass(eq=False, slots=True)
class Recording:
    """The turns and events of one attempt.

    Args:
        uid: `<group>/<member>`.
        temperature: of its calls.
        started_at: wall-clock time, ISO 8601.
        began_s: the same moment on the clock of all other times.
        earlier: attempts at the same task that failed.
    """

    uid: str
    prompt: Prompt
    kind: Kind
    attempt: int
    temperature: float
    started_at: str
    began_s: float
    earlier: tuple[EarlierAttempt, ...] = ()
    turns: list[RecordedTurn] = field(default_factory=list)
    events: list[RecordedEvent] = field(default_factory=list)
    num_left_out: int = 0
    _call_s: float | None = None
    _granted: dict[str, Any] = field(default_factory=dict)

    def decided(self, decision: Decision, now_s: float, rank: RankView | None, predicted_tokens: int | None) -> None:
        """Notes a decision of the scheduler about this task.

        Args:
            decision: with its reason.
            now_s: the time.
            rank: numbers of the decision's rank, None where it names none.
            predicted_tokens: the context that the scheduler expects at the task's end, None where it cannot say.
        """
        match decision:
            case Admit():
                self._note("admitted", now_s, decision.reason, str(decision.rank))
            case Pause():
                self._note("paused", now_s, decision.reason)
            case Resume():
                self._note("resumed", now_s, decision.reason, str(decision.rank))
            case Refuse():
                self._note("refused", now_s, decision.reason)
            case _:
                pass
        if isinstance(decision, Grant | Resume):
            self._granted = {"reason": decision.reason[:MAX_REASON_CHARS], "predicted_tokens": predicted_tokens}
            if rank is not None:
                self._granted |= {"budget_tokens": rank.budget_tokens, "usage_tokens": rank.usage_tokens}

    def heard(self, name: str, event: Mapping[str, Any], now_s: float) -> None:
        """Notes an event of the router: call, turn, passed, footprint, call_failed or call_cancelled."""
        if name == "call":
            # A call that is asked again is still the same turn's.
            if self._call_s is None or not event.get("attempt"):
                self._call_s = now_s
        elif name == "turn":
            self._turn(event, now_s)
        elif name == "footprint" and not event.get("superseded"):
            # A loop with its own engine: its report is all that is known of the turn.
            self._turn(event, now_s)
        elif name == "passed":
            self._call_s = None
        elif name in {"call_failed", "call_cancelled"}:
            self._note(name, now_s, str(event.get("message") or event.get("code") or ""), str(event.get("rank") or ""))

    def _turn(self, event: Mapping[str, Any], now_s: float) -> None:
        end_s, engine_s = self._since(now_s), max(0.0, float(event.get("engine_s") or 0.0))
        call_s = min(self._since(self._call_s), end_s) if self._call_s is not None else max(0.0, end_s - engine_s)
        footprint = event["footprint"]
        granted, self._granted, self._call_s = self._granted, {}, None
        if len(self.turns) >= MAX_TURNS:
            self.num_left_out += 1
            return
        self.turns.append(
            RecordedTurn(
                turn=len(self.turns),
                call_s=call_s,
                held_s=round(max(0.0, end_s - engine_s - call_s), 6),
                engine_s=round(engine_s, 6),
                end_s=end_s,
                prompt_tokens=footprint["prompt_tokens"],
                completion_tokens=footprint["completion_tokens"],
                cached_tokens=footprint["cached_tokens"],
                image_tokens=footprint.get("image_tokens", 0),
                context_tokens=footprint["context_tokens"],
                rank=str(event.get("rank") or ""),
                model_version=int(event.get("version", -1)),
                finish_reason=str(event.get("finish_reason") or ""),
                **granted,
            )
        )

    def _note(self, kind: Any, now_s: float, reason: str, rank: str = "") -> None:
        if len(self.events) >= MAX_EVENTS:
            self.num_left_out += 1
            return
        at_s = self._since(now_s)
        self.events.append(RecordedEvent(at_s=at_s, kind=kind, reason=reason[:MAX_REASON_CHARS], rank=rank))

    def _since(self, now_s: float) -> float:
        return round(max(0.0, now_s - self.began_s), 6)


class Choice:
    """Which attempts are recorded: held-out prompts that the report shows, and a few of training now and then.

    Of an evaluation by sampling the first `num_samples` tasks; of training the first `num_trajectories` tasks that
    start at a model version that `every` divides; a repeated attempt where the one before it was recorded. Nothing of a
    warm start (its versions are negative).

    Args:
        num_samples: tasks of each evaluation; 0: none.
        every: model versions between recorded training tasks; 0: none.
        num_trajectories: training tasks at each of them.
    """

    def __init__(self, num_samples: int, every: int, num_trajectories: int) -> None:
        self._num_samples = num_samples
        self._every = every
        self._num_trajectories = num_trajectories
        self._version = -1
        self._num_chosen = 0

    def wants(self, kind: Kind, member: int, temperature: float, version: int) -> bool:
        """True if the first attempt of this task, which starts now at `version`, is to be recorded."""
        if version < 0:
            return False
        if kind == "eval":
            return temperature > 0 and member < self._num_samples
        if not self._every or version % self._every:
            return False
        if version != self._version:
            self._version, self._num_chosen = version, 0
        self._num_chosen += 1
        return self._num_chosen <= self._num_trajectories
