"""What becomes of one task's waiting call: granted, granted after its task is resumed, refused, or taken back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tide_trainer.loop.beliefs import Beliefs
from tide_trainer.loop.episode_clocks import EpisodeClocks
from tide_trainer.loop.flight import CallsInFlight
from tide_trainer.loop.gateway_control import GatewayControl
from tide_trainer.loop.ports import RouterPort
from tide_trainer.loop.rank_versions import RankVersions
from tide_trainer.loop.shell_task import ShellTask, to_trajectory
from tide_trainer.scheduling.plan import Grant, Resume

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallAnswers:
    """Answers calls through the router.

    Attributes:
        tasks: the shell's tasks by session.
        predicted_tokens: how long a task's context is expected to get, by session.
        hold: files a call again that was taken back before its grant.
    """

    router: RouterPort
    tasks: Mapping[str, ShellTask]
    in_flight: CallsInFlight
    control: GatewayControl
    clocks: EpisodeClocks
    beliefs: Beliefs
    versions: RankVersions
    predicted_tokens: Callable[[str], int | None]
    hold: Callable[[ShellTask], None]

    def grant(self, task: ShellTask, call: str | None, grant: Grant | Resume) -> None:
        """Lets a call go to its rank's engine; one that is over meanwhile is left."""
        # A task may have ended, and its call with it, while it was being resumed at the gateway.
        if call is None or task.call != call or self.tasks.get(task.session) is not task:
            return
        if task.recalled == call:
            self.in_flight.end(call)
            self.hold(task)
            return
        task.call, task.granted, task.rank = None, call, grant.rank
        self.clocks.go(task.session)
        self.beliefs.granted(call, task.session, grant.rank, sum(task.asked))
        self.in_flight.begin(call, grant.rank)
        self.router.grant(call, grant.rank, grant.version, self.predicted_tokens(task.session))

    async def resume(self, task: ShellTask, call: str | None, grant: Resume) -> None:
        """Resumes a task at the gateway, and then grants its call."""
        await self.control.resume(task)
        self.grant(task, call, grant)

    def abort(self, task: ShellTask) -> None:
        """Takes a granted call back from its engine; too late, its turn comes, else it is held again."""
        if task.granted is not None:
            self.router.abort(task.granted)
        else:
            task.recalled = task.call  # its grant waits for the task's resume, and is not given then

    def refuse(self, task: ShellTask, reason: str) -> None:
        """Answers a call with an error, or ends a task that has none."""
        _LOG.warning("task %s is refused: %s", task.session, reason)
        if task.call is not None:
            call, task.call = task.call, None
            self.clocks.go(task.session)
            # 410: the task is over without a reward, and does not ask again; an overflow would be the model's own.
            lost = task.version is not None and self.versions.best_keeper(task.version) is None
            self.router.refuse(call, "session_ended" if lost else "context_length_exceeded", reason)
        elif not task.result.done():
            task.result.set_result(to_trajectory(task, None, {"outcome": "refused", "error": reason}))
