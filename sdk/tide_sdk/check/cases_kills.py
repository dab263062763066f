"""Checks that end the server: it is killed after it acted, and must not pretend to know what it has lost."""

from __future__ import annotations

from tide_sdk import codec
from tide_sdk.check.answers import refused
from tide_sdk.check.case import Failed, case
from tide_sdk.check.cases_http import CALLS, connect
from tide_sdk.check.cases_turns import ONCE
from tide_sdk.check.talk import Talk

STOP_S = 10.0
"""Seconds that a gateway gives a server after SIGTERM, about."""


@case(
    "kill.lost",
    ONCE,
    "A server that died after it acted does not know the task any more: 404, another incarnation.",
    kills=True,
)
async def lost(talk: Talk) -> None:
    """Killed after one answer and in the middle of another turn; nothing of either is acted on again."""
    before = await talk.health()
    body = talk.start_body()
    acted = talk.begun(body, await talk.send("POST", "/start", body))
    tasks = [(acted, talk.action_of(acted))]
    await talk.act(acted)
    if before.capacity - before.tasks > 1:
        acting = await talk.start()
        action = talk.action_of(acting, talk.plan.slow_action)
        tasks.append((acting, action))
        async with connect(talk) as connection:
            await connection.write(connection.post("/observation", codec.dumps(action)))
            await talk.health()  # answered after the action has come
            await talk.subject.kill()
    else:
        await talk.subject.kill()
    talk.forget_tasks()
    await talk.subject.restart()
    after = await talk.health()
    if after.incarnation == before.incarnation:
        raise Failed("the incarnation is the same after a kill: a gateway would send a turn again that has acted")
    if after.tasks:
        raise Failed(f"after a kill GET /health counts {after.tasks} tasks and not 0")
    for task, action in tasks:
        refused(await talk.send("POST", "/observation", action), "not_found")
        refused(await talk.send("POST", "/observation", talk.action_of(task) | {"turn": 1}), "not_found")
        refused(await talk.get(task.task_id), "not_found")
        for path in ("/pause", "/resume", "/end"):
            refused(await talk.post(path, task_id=task.task_id), "not_found")
    new = talk.begun(body, await talk.send("POST", "/start", body))
    if new.task_id == acted.task_id:
        raise Failed("a start after a kill was given the task_id of a task that is lost")
    await talk.act(new)


@case("kill.stop", CALLS, "SIGTERM ends the server with exit code 0, also with a task and a connection.", kills=True)
async def stop(talk: Talk) -> None:
    """And it comes up again where the command is run again."""
    await talk.start()
    async with connect(talk) as connection:
        await connection.write(connection.head("GET", "/health"))
        await connection.read()
        code = await talk.subject.terminate(STOP_S)
    talk.forget_tasks()
    await talk.subject.restart()
    if code != 0:
        raise Failed(f"SIGTERM ended it with exit code {code} and not 0")
    await talk.health()


CASES = (lost, stop)
