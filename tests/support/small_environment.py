"""An environment server that shares only the contract's models with the SDK's, and has faults on request.

`python small_environment.py --uds PATH [--capacity N] [--state FILE] [FAULT ...]`. What it does without a fault is what
the contract asks for; each fault is the name of a test's case. It plays one game: it says back what it hears.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from small_episode import OVER, Episode

from tide_sdk import codec
from tide_sdk.asgi import parse_json, validate
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import EndRequest, EpochRequest, ObservationRequest, StartRequest

MAX_BODY_BYTES = 32 * 1024 * 1024


class SmallServer:
    """The ASGI app."""

    def __init__(self, *faults: str, capacity: int = 4, state: Path | None = None) -> None:
        self.faults = frozenset(faults)
        self.capacity = capacity
        self.incarnation = "always-the-same" if "same_incarnation" in faults else secrets.token_hex(8)
        self.episodes: dict[str, Episode] = {}
        self.keys: dict[str, Episode] = {}
        self.state_file = state
        self.said_last = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        headers = [] if "no_contract_header" in self.faults else [(b"tide-contract", b"1")]
        try:
            status, data = await self._route(scope, receive)
            kind = b"application/json"
        except TideError as error:
            problem = error.problem().model_dump()
            status, data = error.status, problem if "no_codes" not in self.faults else problem | {"title": ""}
            kind = b"text/html" if "errors_are_html" in self.faults else b"application/problem+json"
            headers += [(b"retry-after", b"1")] if status == 429 else []
            headers += [(b"allow", error.extra["allow"].encode())] if "allow" in error.extra else []
        headers += [(b"connection", b"close")] if "closes_connections" in self.faults else []
        body = codec.dumps(data)
        headers += [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _route(self, scope: Any, receive: Any) -> tuple[int, Any]:
        method, path = scope["method"], scope["path"]
        routes = {"/health": "GET", "/observation": "GET POST", "/start": "POST", "/pause": "POST", "/resume": "POST"}
        routes["/end"] = "POST"
        if path not in routes:
            raise TideError("not_found", "no such endpoint")
        if method not in routes[path]:
            allow = {} if "no_allow" in self.faults else {"allow": routes[path].replace(" ", ", ")}
            raise TideError("method_not_allowed", f"{path} takes {routes[path]}", **allow)
        if path == "/health":
            live = self._live()
            health = {"contract": 1, "environment": "small", "capacity": self.capacity, "tasks": live}
            return 200, health | {"incarnation": self.incarnation}
        if method == "GET":
            ids = parse_qs(scope["query_string"].decode()).get("task_id")
            if ids is None:
                raise TideError("invalid", "task_id: missing", field="task_id")
            episode = self._episode(ids[0])
            episode.not_over()
            if "reads_extend" in self.faults:
                episode.enter(episode.state, new_turn=True)
            return 200, episode.observation()
        data = parse_json(await self._body(scope, receive))
        if "unknown_fields_pass" in self.faults and isinstance(data, dict):
            data.pop("mispelt", None)
        if path == "/start":
            return 201, self._start(validate(StartRequest, data)).started
        if path == "/observation":
            return 200, await self._observe(validate(ObservationRequest, data), data["message"], receive)
        if path == "/end":
            request = validate(EndRequest, data)
            return 200, await self._episode(request.task_id).end(request.reason)
        request = validate(EpochRequest, data)
        return 200, self._episode(request.task_id).pause(request, path == "/pause")

    async def _body(self, scope: Any, receive: Any) -> bytes:
        headers = dict(scope["headers"])
        if headers.get(b"tide-contract", b"1") != b"1":
            raise TideError("invalid", "Tide-Contract: only version 1", field="Tide-Contract")
        kind = headers.get(b"content-type", b"").partition(b";")[0]
        if kind != b"application/json" and "any_media_type" not in self.faults:
            raise TideError("media_type", "send application/json")
        body, more = bytearray(), True
        limit = 100_000 if "small_bodies" in self.faults else 1 << 40 if "any_size" in self.faults else MAX_BODY_BYTES
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise TideError("invalid", "half a body")
            body += event.get("body", b"")
            more = event.get("more_body", False)
            if len(body) > limit:
                raise TideError("too_large", f"at most {limit} bytes")
        return bytes(body)

    def _live(self) -> int:
        gone = OVER if "done_holds_its_place" in self.faults else (*OVER, TaskState.DONE)
        return sum(episode.state not in gone for episode in self.episodes.values())

    def _episode(self, task_id: str) -> Episode:
        if task_id not in self.episodes:
            raise TideError("not_found", "no such task")
        return self.episodes[task_id]

    def _start(self, request: StartRequest) -> Episode:
        older = self.keys.get(request.key)
        if older is not None and older.state in OVER and "forgets_starts_at_the_end" in self.faults:
            older = None
        if "older_keeps_its_place" in self.faults and self._live() >= self.capacity and older and request.attempt:
            raise TideError("capacity", "full", retry_after_s=1)
        if older is not None and "keys_start_anew" not in self.faults:
            if request.attempt < older.request.attempt:
                raise TideError("stale_attempt", "a higher one has started")
            if request.attempt == older.request.attempt:
                if request != older.request and "any_body_for_a_key" not in self.faults:
                    raise TideError("key_conflict", "key: used", field="key")
                return older
            older.superseded = True
            older.cut({"kind": "aborted", "reason": "superseded"}, TideError("ended", "superseded"))
        live = self._live()
        if live >= self.capacity and "never_full" not in self.faults:
            raise TideError("capacity", "full", retry_after_s=1)
        return self._add(secrets.token_hex(8), request)

    def _add(self, task_id: str, request: StartRequest) -> Episode:
        episode = self.episodes[task_id] = self.keys[request.key] = Episode(task_id, request, self.faults)
        if self.state_file is not None:
            with self.state_file.open("a") as file:
                file.write(json.dumps([task_id, request.model_dump(mode="json")]) + "\n")
        return episode

    async def revive(self) -> None:
        """Take up what an earlier process wrote down, as if nothing were lost."""
        if self.state_file is not None and self.state_file.exists() and "keeps_lost_tasks" in self.faults:
            for line in self.state_file.read_text().splitlines():
                task_id, request = json.loads(line)
                self.episodes[task_id] = Episode(task_id, StartRequest.model_validate(request), self.faults)

    async def _observe(self, request: ObservationRequest, message: Any, receive: Any) -> dict[str, Any]:
        episode = self._episode(request.task_id)
        answer = episode.begin(request.turn, message)
        if "stops_with_its_caller" in self.faults:
            gone = asyncio.create_task(receive())
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                assert episode.acting is not None
                episode.acting.cancel()
                episode.last = None
                episode.enter(TaskState.WAITING, new_turn=True)
                answer.set_exception(TideError("unavailable", "the caller is gone"))
            gone.cancel()
        observed = await asyncio.shield(answer)
        if "mixes_tasks" in self.faults:
            mine, self.said_last = self.said_last, observed["messages"]
            await asyncio.sleep(0)
            return observed | {"messages": mine or observed["messages"]}
        return observed


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--capacity", type=int, default=4)
    parser.add_argument("--state", type=Path)
    parser.add_argument("faults", nargs="*")
    arguments = parser.parse_args()
    app = SmallServer(*arguments.faults, capacity=arguments.capacity, state=arguments.state)
    await app.revive()
    config = uvicorn.Config(app, uds=arguments.uds, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    if "ignores_sigterm" in arguments.faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif "dies_of_sigterm" not in arguments.faults:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
    server.capture_signals = nullcontext  # uvicorn would die of the signal once it has stopped
    await server.serve()


if __name__ == "__main__":
    asyncio.run(main())
