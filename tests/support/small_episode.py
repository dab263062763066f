"""One task of `small_environment`: its states, clocks and turns, right or with a fault."""

from __future__ import annotations

import asyncio
import json
import time
import unicodedata
from typing import Any

from tide_sdk import codec
from tide_sdk.clocks import ClockName, TaskState, enter, first_expired, new_clocks
from tide_sdk.errors import TideError
from tide_sdk.wire import EpochRequest, StartRequest

LIMITS = {
    ClockName.START: 60.0,
    ClockName.IDLE: 600.0,
    ClockName.TURN: 60.0,
    ClockName.ACTIVE: 3600.0,
    ClockName.END: 9.0,
}
SLOW_S = 1.0
IMAGE = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
OVER = (TaskState.ENDING, TaskState.ENDED)


class Episode:
    """One task."""

    def __init__(self, task_id: str, request: StartRequest, faults: frozenset[str]) -> None:
        self.task_id, self.request, self.faults = task_id, request, faults
        self.state, self.turn, self.epoch, self.effects, self.reward = TaskState.WAITING, 0, 0, 0, 0.0
        self.clocks = enter(new_clocks(LIMITS | (request.limits or {})), TaskState.WAITING, self._now())
        self.latest: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something."}]}
        self.latest |= {"reward": None, "terminated": False, "truncated": False, "info": {}}
        self.last: tuple[int, Any, asyncio.Future[dict[str, Any]]] | None = None
        self.acting: asyncio.Task[None] | None = None
        self.outcome: dict[str, Any] | None = None
        self.account: dict[str, Any] | None = None
        self.superseded = False
        self.timer: asyncio.TimerHandle | None = None
        names = {name.value: clock.limit_s for name, clock in self.clocks.items()}
        self.started = {
            "task_id": task_id,
            "turn": 0,
            "messages": self.latest["messages"],
            "tools": [],
            "limits": names,
        }
        self.started["clocks"] = self.view()
        self._wind()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def enter(self, state: TaskState, new_turn: bool = False) -> None:
        self.state = state
        if not (state is TaskState.PAUSED and "timers_run_while_paused" in self.faults):
            self.clocks = enter(self.clocks, state, self._now(), new_turn=new_turn)
        self._wind()

    def _wind(self) -> None:
        """Look again when the next clock is over."""
        if self.timer is not None:
            self.timer.cancel()
        running = [clock.remaining(self._now()) for clock in self.clocks.values() if clock.running_since_s is not None]
        self.timer = asyncio.get_running_loop().call_later(min(running) + 0.001, self.expire) if running else None

    def expire(self) -> None:
        clock = first_expired(self.clocks, self._now())
        if clock is None:
            self._wind()
        elif f"no_{clock.value}_clock" not in self.faults:
            code = "turn_expired" if clock is ClockName.TURN else "expired"
            self.cut({"kind": "expired", "clock": clock.value}, TideError(code, "too late", clock=clock.value))

    def view(self) -> dict[str, Any]:
        now = self._now()
        return {
            name.value: {"limit_s": c.limit_s, "consumed_s": c.consumed(now), "remaining_s": c.remaining(now)}
            for name, c in self.clocks.items()
        }

    def observation(self) -> dict[str, Any]:
        return {"turn": self.turn, "clocks": self.view()} | self.latest

    def not_over(self) -> None:
        if self.outcome is not None and self.outcome["kind"] == "expired":
            raise TideError("expired", "a clock has passed", clock=self.outcome["clock"])
        if self.state in OVER:
            raise TideError("ended", "the task has ended")

    def begin(self, turn: int, message: Any) -> asyncio.Future[dict[str, Any]]:
        """The future answer of a turn, whether it is new or repeated."""
        if self.last is not None and turn == self.last[0]:
            known = codec.same(self._compared(message), self._compared(self.last[1]))
            if not known and "conflict_unnoticed" not in self.faults:
                raise TideError("turn_conflict", "another message")
            answer = self.last[2]
            if "acts_when_repeated" in self.faults and answer.done():
                self.effects += 1
            if answer.done() and answer.exception() is not None:
                self.not_over()
            if "forgets_at_the_end" in self.faults:
                self.not_over()
            if "acts_for_each_call" not in self.faults or answer.done():
                return answer
        else:
            self._may_act(turn)
        answer = asyncio.get_running_loop().create_future()
        self.last = (turn, message, answer)
        self.enter(TaskState.ACTING, new_turn=True)
        self.acting = asyncio.create_task(self._act(turn, message, answer))
        return answer

    def _may_act(self, turn: int) -> None:
        if self.superseded:
            raise TideError("stale_attempt", "a newer attempt has started")
        self.not_over()
        if self.state is TaskState.DONE:
            raise TideError("state_conflict", "done")
        if turn != self.turn or self.state in (TaskState.ACTING, TaskState.PAUSING):
            raise TideError("turn_order", f"the next turn is {self.turn}")
        if self.state is TaskState.PAUSED and "acts_while_paused" not in self.faults:
            raise TideError("paused", "paused")

    def _compared(self, message: Any) -> Any:
        if "compares_ascii" not in self.faults:
            return message
        return json.loads(json.dumps(message, ensure_ascii=False).encode("ascii", "ignore"))

    async def _act(self, turn: int, message: Any, answer: asyncio.Future[dict[str, Any]]) -> None:
        self.effects += 1
        content = message.get("content") or ""
        words = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        info = {"effects": self.effects}
        if words == "slow" and "blocks_while_acting" in self.faults:
            time.sleep(SLOW_S)  # noqa: ASYNC251 (the fault)
        elif words == "slow":
            await asyncio.sleep(SLOW_S)
        else:
            await asyncio.sleep(0.02 if "stops_with_its_caller" in self.faults else 0)
        said = unicodedata.normalize("NFC", words) if "composes_text" in self.faults else words[:100_000]
        parts: Any = f"You said: {said}"
        if words == "image":
            url = IMAGE.replace("R0l", "R0 l") if "spoils_images" in self.faults else IMAGE
            parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
        elif words == "large":
            parts = "large " * 100_000
        pausing, self.turn = self.state is TaskState.PAUSING, turn + 1
        reward: Any = "0.5" if "reward_is_a_string" in self.faults else 0.5
        self.reward += 0.5
        self.latest = {"messages": [{"role": "user", "content": parts}], "reward": reward, "info": info}
        self.latest |= {"terminated": words == "bye", "truncated": False}
        if words == "bye":
            self.outcome = {"kind": "completed"}
            self.enter(TaskState.DONE)
        else:
            self.enter(TaskState.WAITING, new_turn=True)
            if pausing:
                self.enter(TaskState.PAUSED)
        if not answer.done():
            answer.set_result(self.observation())

    def pause(self, request: EpochRequest, pause: bool) -> dict[str, Any]:
        self.not_over()
        if request.epoch is None or request.epoch > self.epoch or "stale_epochs_apply" in self.faults:
            self.epoch = self.epoch if request.epoch is None else request.epoch
            there = {TaskState.WAITING: TaskState.PAUSED, TaskState.ACTING: TaskState.PAUSING}
            back = {after: before for before, after in there.items()}
            anew = "resumes_begin_anew" in self.faults and not pause
            self.enter((there if pause else back).get(self.state, self.state), new_turn=anew)
        return {"state": self.state.value, "epoch": self.epoch, "clocks": self.view()}

    def cut(self, outcome: dict[str, Any], error: TideError) -> None:
        if self.acting is not None:
            self.acting.cancel()
        self.outcome = outcome
        self.enter(TaskState.ENDED)
        if self.last is not None and not self.last[2].done():
            self.last[2].set_exception(error)
            self.last[2].exception()  # it may be that nobody waits

    async def end(self, reason: str | None) -> dict[str, Any]:
        if "ends_after_the_action" in self.faults and self.acting is not None:
            await self.acting
        if self.outcome is None:
            told = reason.encode("ascii", "replace").decode() if reason and "reason_in_ascii" in self.faults else reason
            self.cut({"kind": "aborted", "reason": told}, TideError("ended", "the task was ended"))
        self.enter(TaskState.ENDED)
        if self.account is None or "another_account_each_time" in self.faults:
            reward = None if self.outcome and self.outcome.get("clock") == "turn" else self.reward
            if self.account is not None:
                reward = 7.0
            self.account = {"reward": reward, "metrics": {}, "turns": self.turn, "clocks": self.view()}
            self.account["outcome"] = self.outcome
        return self.account
