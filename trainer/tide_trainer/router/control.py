"""What the main process asks of the router: sessions opened and closed, ranks, grants.

| request | payload -> reply |
| --- | --- |
| open | {session, api_key, sampling: {temperature, max_new_tokens, kind?}, max_context_tokens} -> {} |
| close | {session} -> {segments, num_calls, num_breaks, prompt_tokens, cached_tokens, completion_tokens} |
| rank | {rank, url, token?} -> {} (a rank again with another URL replaces it) |
| drop_rank | {rank} -> {} (its calls in flight fail and are asked again) |
| grant | {call, rank, version?, priority?, final_tokens?} -> {} |
| refuse | {call, code, message} -> {} |
| abort | {call} -> {aborting} (a call at its engine is ended there and asked for again; false: it is not there) |
| reporters | {token} -> {} (the bearer token of `POST /footprints`; without one it answers 401) |
| stats | {} -> {sessions, held, running, reports: {accepted, stale, superseded, refused}, lag_max_s, cpu_s} |

`kind` is train (also without it) or eval.
`open` is idempotent while the key is the same; `close` of an unknown session is the error `unknown_session`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from tide_trainer import types
from tide_trainer.channel import Handler, PeerError
from tide_trainer.engine_client import EngineClient
from tide_trainer.router.calls import Calls
from tide_trainer.router.generations import Engine
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.sessions import Capture
from tide_trainer.router.state import Grant, Limits, Session
from tide_trainer.segments import segment_data

MAX_NAME_CHARS = 512
MAX_ENDED = 4096
"""Names of closed sessions that are remembered, to answer their late calls with 410 and not 404."""
MakeEngine = Callable[[str, str | None], Engine]


def make_engine_client(url: str, token: str | None) -> Engine:
    """The real client of a rank."""
    return EngineClient(url, token=token, max_in_flight=1024)


def _digest(api_key: bytes) -> bytes:
    """Keys are looked up by digest, so that the time of a look-up says nothing about them."""
    return hashlib.sha256(api_key).digest()


class Control:
    """The router's state, and the handlers of the main process's requests."""

    def __init__(
        self,
        renderer: Renderer,
        calls: Calls,
        limits: Limits,
        lag_max_s: Callable[[], float],
        make_engine: MakeEngine = make_engine_client,
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self._renderer = renderer
        self._calls = calls
        self._limits = limits
        self._lag_max_s = lag_max_s
        self._make_engine = make_engine
        self.reporter_token = b""
        self.num_reports: dict[str, int] = dict.fromkeys(("accepted", "stale", "superseded", "refused"), 0)
        self._by_key: dict[bytes, str] = {}
        self._urls: dict[str, str] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def handlers(self) -> dict[str, Handler]:
        """By name of request."""
        return {
            "open": self.open,
            "close": self.close,
            "rank": self.rank,
            "drop_rank": self.drop_rank,
            "grant": self.grant,
            "refuse": lambda data: self._calls.refuse(str(data["call"]), str(data["code"]), str(data["message"])),
            "abort": lambda data: {"aborting": self._calls.generations.abort(str(data["call"]))},
            "reporters": self.reporters,
            "stats": self.stats,
        }

    def open(self, data: Mapping[str, Any]) -> None:
        """Open a session; one that was closed begins anew."""
        name, api_key = str(data["session"]), str(data["api_key"]).encode()
        known = self.sessions.get(name)
        if known is not None:
            if known.api_key != api_key:
                raise PeerError("session_exists", f"session {name!r} is open with another key")
            return
        if not name or len(name) > MAX_NAME_CHARS or len(api_key) < 8:
            raise PeerError("invalid", "session needs 1 to 512 characters and api_key at least 8")
        if len(self.sessions) >= self._limits.max_sessions:
            raise PeerError("capacity", f"{self._limits.max_sessions} sessions are open")
        sampling = data["sampling"]
        self.sessions[name] = Session(
            name=name,
            api_key=api_key,
            sampling=types.Sampling(
                float(sampling["temperature"]),
                int(sampling["max_new_tokens"]),
                tuple(sampling.get("stop_token_ids", ())),
            ),
            max_context_tokens=int(data["max_context_tokens"]),
            capture=Capture(self._renderer, int(data["max_context_tokens"])),
            training=sampling.get("kind", "train") == "train",
            used_s=time.monotonic(),
        )
        self._by_key[_digest(api_key)] = name
        self._ended.pop(name, None)

    def close(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Close a session and hand over what it captured; calls in flight are cancelled."""
        session = self.sessions.pop(str(data["session"]), None)
        if session is None:
            raise PeerError("unknown_session", f"session {data['session']!r} is not open")
        self._by_key.pop(_digest(session.api_key), None)
        self._ended[session.name] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        for flight in session.flights.values():
            flight.task.cancel()
        return {
            "segments": [segment_data(segment) for segment in session.capture.segments()],
            "num_calls": session.num_calls,
            "num_breaks": session.capture.num_breaks,
            "prompt_tokens": session.prompt_tokens,
            "cached_tokens": session.cached_tokens,
            "completion_tokens": session.completion_tokens,
        }

    def ended(self, name: str) -> bool:
        """True if the session was closed lately."""
        return name in self._ended

    def session_of(self, api_key: bytes) -> str | None:
        """The name of the open session that has this key."""
        return self._by_key.get(_digest(api_key))

    def reporters(self, data: Mapping[str, Any]) -> None:
        """Set the token of footprint reports."""
        self.reporter_token = str(data["token"]).encode()

    def rank(self, data: Mapping[str, Any]) -> None:
        """Make a rank known."""
        name, url, token = str(data["rank"]), str(data["url"]), data.get("token")
        if self._urls.get(name) == url:
            return
        self.drop_rank(data)
        self._calls.ranks[name] = self._make_engine(url, token)
        self._urls[name] = url

    def drop_rank(self, data: Mapping[str, Any]) -> None:
        """Forget a rank; its calls in flight fail at once and are asked again."""
        name = str(data["rank"])
        self._urls.pop(name, None)
        engine = self._calls.ranks.pop(name, None)
        if engine is not None:
            task = asyncio.create_task(engine.aclose(), name=f"close rank {name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def grant(self, data: Mapping[str, Any]) -> None:
        """Release a held call to a rank."""
        final = data.get("final_tokens")
        grant = Grant(
            str(data["rank"]),
            int(data.get("version", -1)),
            int(data.get("priority", 0)),
            None if final is None else int(final),
        )
        self._calls.grant(str(data["call"]), grant)

    def stats(self, _: Any) -> dict[str, Any]:
        """The router's own numbers; the largest event-loop lag is that since the last call."""
        return {
            "sessions": len(self.sessions),
            "held": self._calls.num_held,
            "running": len(self._calls.generations),
            "reports": dict(self.num_reports),
            "lag_max_s": self._lag_max_s(),
            "cpu_s": time.process_time(),
        }

    def expire(self, now_s: float) -> list[str]:
        """Close sessions without a call for `session_idle_s`; their names. What they captured is lost."""
        limit_s = self._limits.session_idle_s
        old = [name for name, one in self.sessions.items() if not one.flights and now_s - one.used_s > limit_s]
        for name in old:
            self.close({"session": name})
        return old
