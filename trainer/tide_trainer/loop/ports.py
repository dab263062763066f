"""The main process's ends of the channels to the router and to the agent workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tide_trainer.channel import Channel, ChannelClosed
from tide_trainer.types import RankId

_TIMEOUT_S = 30.0


class RouterPort:
    """Control of the router's process.

    Args:
        channel: the channel that the router opened.
        url: the router's base URL, for agents.
    """

    def __init__(self, channel: Channel, url: str) -> None:
        self._channel = channel
        self.url = url

    def handle(self, **handlers: Callable[[Any], None]) -> None:
        """Sets what is done with the router's events."""
        for name, handler in handlers.items():
            self._channel.handle(name, handler)

    async def open(self, session: str, api_key: str, sampling: Mapping[str, Any], max_context_tokens: int) -> None:
        """Makes a session, which agents reach at `<url>/sessions/<session>/v1` with its key."""
        await self._channel.request(
            "open",
            {"session": session, "api_key": api_key, "sampling": sampling, "max_context_tokens": max_context_tokens},
            timeout_s=_TIMEOUT_S,
        )

    async def close(self, session: str) -> dict[str, Any]:
        """Ends a session; returns the captured segments and sums."""
        return await self._channel.request("close", {"session": session}, timeout_s=_TIMEOUT_S)

    async def add_rank(self, rank: RankId, url: str, token: str | None) -> None:
        """Makes an engine known."""
        await self._channel.request("rank", {"rank": str(rank), "url": url, "token": token}, timeout_s=_TIMEOUT_S)

    async def drop_rank(self, rank: RankId) -> None:
        """Forgets an engine; its calls in flight are asked for again."""
        await self._channel.request("drop_rank", {"rank": str(rank)}, timeout_s=_TIMEOUT_S)

    async def admit_reporters(self, token: str) -> None:
        """Makes the router take footprints from who has the token."""
        await self._channel.request("reporters", {"token": token}, timeout_s=_TIMEOUT_S)

    def grant(self, call: str, rank: RankId, version: int, final_tokens: int | None = None) -> None:
        """Lets a held call go to a rank, which serves `version`; its context is expected to get `final_tokens` long."""
        self._channel.notify(
            "grant", {"call": call, "rank": str(rank), "version": version, "final_tokens": final_tokens}
        )

    def refuse(self, call: str, code: str, message: str) -> None:
        """Answers a held call with an error."""
        self._channel.notify("refuse", {"call": call, "code": code, "message": message})

    def abort(self, call: str) -> None:
        """Takes a granted call back from its engine; it is held again under a new number. Too late: nothing happens."""
        self._channel.notify("abort", {"call": call})


class WorkerPool:
    """The agent worker processes, each behind a channel.

    Args:
        channels: one per worker.
        model: the model's name for agents.
        reporter_token: what the workers' footprint reports are sent with, None if they send none.
    """

    def __init__(self, channels: list[Channel], model: str, reporter_token: str | None = None) -> None:
        self._channels = channels
        self._model = model
        self._reporter_token = reporter_token
        self._done: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._started: Callable[[Mapping[str, Any]], None] | None = None
        self._load = dict.fromkeys(channels, 0)
        for channel in channels:
            channel.handle("started", self._on_started)
            channel.handle("done", self._on_done)
            channel.on_close(lambda reason, channel=channel: self._lost(channel, reason))
        self._sessions: dict[str, Channel] = {}

    def handle(self, *, started: Callable[[Mapping[str, Any]], None]) -> None:
        """Sets what is done when a task has started at the gateway: `{session, task_id}`."""
        self._started = started

    async def run(self, session: str, spec: Mapping[str, Any], api_key: str, router_url: str) -> dict[str, Any]:
        """Plays one task on the least loaded worker; returns its account. Cancelling aborts the task.

        Without a living worker, and where its worker dies, the account's outcome is `infrastructure`.
        """
        living = [channel for channel in self._channels if not channel.closed]
        if not living:
            return _lost_account("no other is left")
        channel = min(living, key=self._load.__getitem__)
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._done[session], self._sessions[session] = done, channel
        self._load[channel] += 1
        try:
            channel.notify(
                "run",
                {
                    "session": session,
                    "api_key": api_key,
                    "spec": spec,
                    "router_url": router_url,
                    "model": self._model,
                    "footprint_token": self._reporter_token,
                },
            )
            return await done
        except asyncio.CancelledError:
            if not channel.closed:
                channel.notify("abort", {"session": session})
            raise
        except ChannelClosed as error:
            return _lost_account(str(error))
        finally:
            self._load[channel] -= 1
            del self._done[session], self._sessions[session]

    def _on_started(self, event: Mapping[str, Any]) -> None:
        if self._started is not None:
            self._started(event)

    def _on_done(self, event: dict[str, Any]) -> None:
        done = self._done.get(event["session"])
        if done is not None and not done.done():
            done.set_result(event)

    def _lost(self, channel: Channel, reason: str) -> None:
        for session, where in self._sessions.items():
            done = self._done[session]
            if where is channel and not done.done():
                done.set_result(_lost_account(reason))


def _lost_account(reason: str) -> dict[str, Any]:
    return {"outcome": "infrastructure", "reward": None, "turns": 0, "error": f"the agent worker is gone: {reason}"}
