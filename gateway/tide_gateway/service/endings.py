"""How tasks end: by the caller, by a clock, by a lost or broken environment; and how they let go of it.

    any open state -> [commit: ending, with the outcome] -> waiting calls get their error
                                                         -> release: upstream /end, at most the `end` limit
                   -> [commit: ended, with the account]  -> slot given back
    done           -> the same release, the task stays done until `/end` reads it, or ends with it where one waits

One replica releases a task; the others wait for its row. If it dies, another one releases it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping

from tide_gateway import deadlines, lifecycle, upstream
from tide_gateway.fleet import Fleet
from tide_gateway.lifecycle import Task
from tide_gateway.repository.slots import Releases
from tide_gateway.rows import Event
from tide_gateway.runtimes import Gone, Server
from tide_gateway.service import answers
from tide_gateway.service.faults import fault
from tide_gateway.service.following import Looks
from tide_gateway.service.live import Live, Registry
from tide_sdk import codec
from tide_sdk.clocks import ClockName, TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import EndRequest, Outcome

log = logging.getLogger(__name__)

RECENT_S = 60.0
"""How far back releases are counted for Retry-After."""
_THAW_AGAIN_S = 0.25


class Endings:
    """Ends tasks and releases their environments.

    Args:
        registry: the open tasks.
        fleets: environment servers by environment.
    """

    def __init__(self, registry: Registry, fleets: Mapping[str, Fleet]) -> None:
        self._registry = registry
        self._fleets = fleets
        self._released_s: dict[str, deque[float]] = {}

    async def end(self, owner: str | None, request: EndRequest) -> bytes:
        """Answer `/end`: end the task if it is open, and give its account. Repeating it gives the same account."""
        live = self._registry.lives.get(request.task_id)
        if live is None or not live.releases or (owner is not None and live.task.owner != owner):
            live = await self._registry.find(owner, request.task_id)

        async def end() -> None:
            await self.refuse_elsewhere(live.task)
            await self.expire_if_overdue(live)
            if lifecycle.is_open(live.task):
                reason = request.reason or "ended by the caller"
                await self.begin(live, Outcome(kind="aborted", reason=reason), detail=reason)
            elif not live.task.released and live.task.worker == self._registry.me:
                self.release(live)

        await self._registry.decide(live, end)
        live.num_ends += 1
        try:
            await self._until_released(live)
        finally:
            live.num_ends -= 1

        async def read_out() -> bytes | None:
            now_s = self._registry.time.now_s()
            if live.task.state is TaskState.DONE and live.task.released:
                read = lifecycle.read_out(live.task, now_s)
                await self._registry.commit(live, read, events=(Event("ended", now_s),))
            if live.task.state is TaskState.ENDED:
                self._registry.forget(live)
                return answers.end_answer(live.task, now_s)
            return None

        answer = await self._registry.decide(live, read_out)
        if answer is None:
            raise TideError("unavailable", "the task is still ending; call again", retry_after_s=1)
        return answer

    async def begin(self, live: Live, outcome: Outcome, *, detail: str = "", error: TideError | None = None) -> None:
        """End an open task; the caller holds its lock. Waiting calls get `error`, or that the task has ended."""
        now_s, since_s = self._registry.time.now_s(), live.task.paused_since_s
        after = lifecycle.ending(live.task, outcome, now_s, detail=detail, worker=self._registry.me)
        words = f"{outcome.kind} {outcome.clock or outcome.reason or ''}".strip()
        event = Event("ending", now_s, words + (f": {detail}" if detail and detail != outcome.reason else ""))
        await self._registry.commit(live, after, events=(event,))
        if since_s is not None:
            self._registry.metrics.paused_s.add(after.environment, by=max(0.0, now_s - since_s))
        self.give_up(live, error or lifecycle.refusal(after))
        self.release(live)

    def give_up(self, live: Live, error: TideError) -> None:
        """Give the error to all calls that wait here for a task that is over."""
        if live.starting is not None and live.starting is not asyncio.current_task():
            live.starting.cancel()
        live.fail_start(error)
        if live.running is not None:
            running, live.running = live.running, None
            running.fail(error)

    async def fail(self, live: Live, code: str, detail: str) -> None:
        """End an open task for a fault that is not the agent's; the caller holds its lock. Its reward is null."""
        await self.begin(live, Outcome(kind="failed", reason=code), detail=detail, error=fault(code, detail))

    async def expire_if_overdue(self, live: Live) -> None:
        """End an open task of which a clock or a cap has run out; the caller holds its lock."""
        task = live.task
        outcome = deadlines.overdue(task, self._registry.time.now_s())
        if outcome is None or not lifecycle.is_open(task):
            return
        await self.refuse_elsewhere(task)
        if self._registry.members.lapsed(asyncio.get_running_loop().time()):
            # What has passed since may be an outage, which no clock counts: the next heartbeat tells.
            raise TideError("unavailable", "the gateway was cut off from its database; call again", retry_after_s=1)
        error, clock = None, outcome.clock
        if clock is ClockName.TURN:
            words = "the environment acted until the task's turn clock ran out"
            error = TideError("turn_expired", words, clock=clock.value, turn=task.turn)
        limit_s = task.clocks[clock].limit_s if clock else getattr(task, outcome.reason or "max_wall_s")
        await self.begin(live, outcome, detail=f"limit {limit_s:g} s", error=error)

    async def expire(self, task_id: str) -> None:
        """Deal with a task that the sweep found overdue."""
        live = self._registry.lives.get(task_id)
        if live is None:
            task = await self._registry.repository.task(task_id)
            if task is None:
                return
            live = self._registry.adopt(task)

        async def expire() -> None:
            await self.expire_if_overdue(live)
            if live.task.state is TaskState.ENDING and live.task.worker == self._registry.me:
                self.release(live)

        await self._registry.decide(live, expire)

    async def lose(self, task_id: str, code: str, detail: str) -> None:
        """The task's instance is gone. A task that is over and not yet released loses its account with it.

        A task that was still starting there is placed again by whoever starts it, unless it is the launch that failed.
        """
        task = await self._registry.repository.task(task_id)
        if task is None:
            return
        live = self._registry.adopt(task)

        async def lose() -> None:
            placed_again = live.task.state is TaskState.STARTING and code == "environment_lost"
            if lifecycle.is_open(live.task) and not placed_again:
                await self.fail(live, code, detail)

        await self._registry.decide(live, lose)

    def release(self, live: Live) -> None:
        """Begin to let go of the environment, again if it failed; the caller holds the lock."""
        if live.releasing is None or live.releasing.done():
            live.releasing = self._registry.spawn(self._release(live), f"tide-release-{live.task.task_id}")

    def at_hand(self, task: Task) -> Server | None:
        """The task's environment server, if it is reached already."""
        return self._fleets[task.environment].at_hand(task.instance) if self.hosts(task) else None

    async def reach(self, task: Task) -> Server:
        """The task's environment server.

        Raises:
            EnvironmentLost: it is gone, or there never was one.
        """
        if not task.instance or task.environment not in self._fleets:
            raise upstream.EnvironmentLost(task.detail or "the task has no environment server")
        return await self._fleets[task.environment].reach(task.instance)

    def hosts(self, task: Task) -> bool:
        """True if this replica registers the task's environment."""
        return task.environment in self._fleets

    async def refuse_elsewhere(self, task: Task) -> None:
        """Leave a task to the replicas that know its environment, as long as one of them keeps its server.

        Raises:
            TideError: they can reach it, and this one cannot.
        """
        if self.hosts(task) or not task.instance or not lifecycle.is_open(task):
            return
        row = await self._registry.repository.instances.get(task.instance)
        if row is not None and row.replica in self._registry.members.alive:
            words = f"environment {task.environment} is not registered at this replica; call another one"
            raise TideError("unavailable", words, retry_after_s=1)

    def freezes(self, task: Task) -> bool:
        """True if the task's environment stops its processes during a pause."""
        return task.environment in self._fleets and self._fleets[task.environment].spec.freeze

    async def freeze(self, task: Task, server: Server, *, frozen: bool) -> None:
        """Stop or continue the server's processes; see `Runtime.freeze`."""
        await self._fleets[task.environment].runtime.freeze(server, frozen)

    def releases(self, environment: str) -> Releases:
        """How many slots were given back lately, by all replicas together if they are alike."""
        seen, now_s = self._released_s.get(environment, deque()), self._registry.time.now_s()
        while seen and seen[0] < now_s - RECENT_S:
            seen.popleft()
        # A quiet minute before the first of them says nothing about how fast they come now.
        recent_s = max(1.0, now_s - seen[0]) if seen else RECENT_S
        return Releases(len(seen) * len(self._registry.members.alive), recent_s)

    async def _release(self, live: Live) -> None:
        account: tuple[float | None, Mapping[str, object]] | None = None
        detail, limit_s = "", live.task.clocks[ClockName.END].limit_s
        fleet = self._fleets.get(live.task.environment)
        try:
            account = await self._say_end(live, limit_s)
        except TimeoutError:
            detail = f"the environment did not end within {limit_s:g} s"
            if fleet is not None and live.task.instance:
                await fleet.condemn(live.task.instance, f"task {live.task.task_id} did not end in time")
        except (upstream.EnvironmentLost, upstream.EnvironmentFailed) as error:
            detail = str(error)

        async def released() -> None:
            if live.task.released or live.task.worker != self._registry.me:
                return  # another replica took it over
            now_s = self._registry.time.now_s()
            after = lifecycle.released(live.task, account, now_s, detail)
            events = (Event("ended" if after.state is TaskState.ENDED else "released", now_s, detail),)
            if after.state is TaskState.DONE and live.num_ends:
                # Who waits for the account has it with this commit.
                after, events = lifecycle.read_out(after, now_s), (*events, Event("ended", now_s))
            await self._registry.commit(live, after, events=events)
            self._released_s.setdefault(after.environment, deque(maxlen=4096)).append(now_s)

        await self._registry.decide(live, released)
        if fleet is not None:
            fleet.note_room()
        self._registry.forget(live)

    async def _say_end(self, live: Live, limit_s: float) -> tuple[float | None, Mapping[str, object]]:
        """Tell the environment server, and read the account."""
        task, peer_task = live.task, live.task.peer_task
        async with asyncio.timeout(limit_s):
            server = await self.reach(task)
            while self.freezes(task):
                try:
                    await self.freeze(task, server, frozen=False)
                    break
                except Gone as error:
                    raise upstream.EnvironmentLost(str(error)) from error
                except OSError as error:
                    log.warning("task %s is not thawed yet: %s", task.task_id, error)
                    await asyncio.sleep(_THAW_AGAIN_S)
            if not peer_task:
                # The start was under way: repeated, it tells the id by which the task can be ended.
                stored = await self._registry.repository.start_of(task.task_id)
                request = codec.loads(stored.request) if stored is not None else {}
                answer, _ = await upstream.start(server, peer_start(task, server.health.environment, request), limit_s)
                peer_task = answer.task_id
            reason = (task.outcome.reason or task.outcome.kind) if task.outcome else "completed"
            return await upstream.end(server, peer_task, reason[:1024], limit_s)

    async def _until_released(self, live: Live) -> None:
        """Return when the environment has let the task go, here or on another replica; bounded by the `end` limit."""
        if live.releasing is not None and not live.releasing.done():
            await asyncio.wait({live.releasing})
        looks = Looks()
        limit_s = live.task.clocks[ClockName.END].limit_s + 2.0 * self._registry.members.lease_s
        while not live.task.released and looks.waited_s < limit_s and not self._registry.closed:
            task = await self._registry.repository.task(live.task.task_id)
            if task is None or task.released or task.worker == self._registry.me:
                live.task = task or live.task
                return
            await looks.pause()


def peer_start(task: Task, environment: str, request: Mapping[str, object]) -> dict[str, object]:
    """The start as the environment server gets it: its own name for itself, our id as the key, looser limits."""
    limits = {name: clock.limit_s for name, clock in task.clocks.items()}
    body: dict[str, object] = {
        "environment": environment,
        "key": f"{task.task_id}/{task.attempt}",
        "kind": task.kind,
        "limits": upstream.peer_limits(limits),
    }
    return body | {name: request[name] for name in ("task", "seed", "split") if request.get(name) is not None}
